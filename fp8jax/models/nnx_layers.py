"""How a transformed NNX layer multiplies: subclasses of Flax's, that find FP8 where they look for a product.

    layer.how__fp8 = How(recipe, backend, path, reason=None)
    change_class(layer, multiplying)                # the layer's own call now multiplies as that says

A layer promotes its operands before it multiplies them. Between the two its kernel is an `_Operand`, which
knows who multiplies it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp8jax.dot import init_state
from fp8jax.models.lora import AdaptedDot
from fp8jax.models.multiply import GEMM_DTYPES, FP8Dot, WideDot
from fp8jax.models.subclass import subclass
from fp8jax.recipe import Recipe
from fp8jax.rewrite import refuse_plain_parameters
from fp8jax.rewrite.report import scope

# The scaling state of `layer.kernel` is `layer.kernel__fp8_scale` and so on.
STATE = "__fp8_"


@dataclasses.dataclass(frozen=True)
class How:
    """How a layer multiplies: a constant of the model's graph."""

    recipe: Recipe
    backend: str
    path: str
    reason: str | None  # why not in FP8
    lora_scale: float | None = None  # of the product of its adapters, if it has some


def rank_of(layer: Any) -> int:
    """The rank of one kernel; a stack of layers, made under `nnx.vmap`, has more axes in front, and so
    have the kernels of experts."""
    if isinstance(layer, nnx.Einsum):
        return len(layer.kernel_shape)
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    return 2


class _Operand:
    """A kernel between a layer's `promote_dtype` and its product, with who multiplies it."""

    def __init__(self, kernel: Any, multiply: FP8Dot | WideDot | AdaptedDot):
        self.kernel, self.multiply = kernel, multiply

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    @property
    def ndim(self) -> int:
        return self.kernel.ndim


def _promote(layer: Any, operands: tuple[Any, Any, Any], *, dtype: Any = None, inexact: bool = True) -> Any:
    del inexact
    refuse_plain_parameters()
    how = layer.how__fp8
    if how.reason is None:
        multiply = FP8Dot(how.recipe, how.backend, functools.partial(state_of, layer), layer.param_dtype)
    else:
        multiply = WideDot(GEMM_DTYPES[how.recipe.gemm], layer.param_dtype)
    if how.lora_scale is not None:
        adapters = layer.lora_a.get_value(), layer.lora_b.get_value()
        multiply = AdaptedDot(multiply, adapters, how.lora_scale)
    inputs, kernel, bias = multiply.operands(*operands, dtype=dtype)
    return inputs, _Operand(kernel, multiply), bias


def state_of(layer: Any, kernel: str = "kernel") -> dict[str, jax.Array]:
    """The scaling state of a layer's kernel.

    Raises:
        ValueError: `nnx.vmap` or `nnx.scan` split the kernel of a stack, and not its state.
    """
    fresh = init_state(layer.how__fp8.recipe)
    state = {name: getattr(layer, f"{kernel}{STATE}{name}").get_value() for name in fresh}
    if kernel == "kernel" and layer.kernel.ndim == rank_of(layer):
        for name, new in fresh.items():
            if state[name].shape != new.shape:
                raise ValueError(
                    f"layer {layer.how__fp8.path!r}: expected the scaling state of one layer, "
                    f"{name}{new.shape}; got {state[name].shape}. Where `nnx.StateAxes` give `nnx.Param` an "
                    "axis, `fp8jax.FP8State` needs it too: `{(nnx.Param, fp8jax.FP8State): 0, ...: None}`."
                )
    return state


def _attend(layer: Any, query: Any, out_sharding: Any = None) -> Any:
    """What `nnx.Embed.attend` does, in FP8."""
    how = layer.how__fp8
    state = functools.partial(state_of, layer, "embedding")
    multiply = FP8Dot(how.recipe, how.backend, state, layer.param_dtype)
    query, table, _ = multiply.operands(query, layer.embedding[...], None, layer.dtype)
    dimensions = (((query.ndim - 1,), (1,)), ((), ()))
    return _dot_general(query, _Operand(table, multiply), dimensions, out_sharding=out_sharding)


def _dot_general(
    lhs: Any, rhs: _Operand, dimension_numbers: Any, *, out_sharding: Any = None, **kw: Any
) -> Any:
    kw.pop("preferred_element_type", None)
    return rhs.multiply.dot_general(lhs, rhs.kernel, dimension_numbers, out_sharding=out_sharding, **kw)


def _einsum(subscripts: str, lhs: Any, rhs: _Operand, *, out_sharding: Any = None, **ignored: Any) -> Any:
    return rhs.multiply.einsum(subscripts, lhs, rhs.kernel, out_sharding)


def _ragged_dot(lhs: Any, rhs: _Operand, group_sizes: Any, over: Any = None) -> Any:
    return rhs.multiply.ragged_dot(lhs, rhs.kernel, group_sizes, over)


def _hook(name: str, make: Callable[[Any], Any]) -> property:
    """What a layer finds in the place of its attribute, which it keeps."""

    def put(layer: Any, new: Any) -> None:
        vars(layer)[name] = new

    return property(make, put)


_SEAMS = {
    "promote_dtype": _hook("promote_dtype", lambda layer: functools.partial(_promote, layer)),
    "dot_general": _hook("dot_general", lambda layer: _dot_general),
    "einsum_op": _hook("einsum_op", lambda layer: _einsum),
    "ragged_dot": _hook("ragged_dot", lambda layer: _ragged_dot),
}


@functools.cache
def multiplying(cls: type) -> type:
    """A subclass whose layers multiply as their `how__fp8` says."""
    return subclass(cls, _SEAMS)


@functools.cache
def attending(cls: type) -> type:
    """A subclass of an embedding whose `attend` multiplies in FP8."""
    return subclass(cls, {"attend": _attend})


@functools.cache
def scoped(cls: type) -> type:
    """A subclass whose products are counted as those of its `path__fp8`."""

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(layer.path__fp8):
            return cls.__call__(layer, *args, **kwargs)

    def attend(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(layer.path__fp8):
            return cls.attend(layer, *args, **kwargs)

    return subclass(cls, {"__call__": call, **({"attend": attend} if hasattr(cls, "attend") else {})})
