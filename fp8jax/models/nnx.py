"""Flax NNX: a copy of a module whose layers multiply under a recipe.

    model = transform(module, recipe)               # a new module; the user's is untouched
    loss, grads = value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)                  # an `nnx.Optimizer`

Matched layers get another class, a subclass of their own that multiplies with `FP8Dot`; their
attributes and parameters keep their names. Beside its kernel such a layer has the scaling state
of its dot, `FP8State`s. They are no `nnx.Param`s, so optimizers and plain gradients pass them by;
`value_and_grad` gives them their new values in place, as NNX does with a BatchNorm's statistics.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8jax import backends, formats, loss_scale
from fp8jax.contraction import is_dot
from fp8jax.dot import init_state, quantized_kernel
from fp8jax.models import attention_layers, blocks, blocks_nnx
from fp8jax.models.lora import AdaptedDot
from fp8jax.models.moe import exchange
from fp8jax.models.moe.nnx import ExpertDense, ExpertRouter
from fp8jax.models.multiply import GEMM_DTYPES, FP8Dot, WideDot
from fp8jax.models.report import OWN_DOT, Report, Row, Rows, measured, scope, trace
from fp8jax.models.rules import Choice, Layer, Rule, Rules
from fp8jax.models.subclass import change_class as _change_class
from fp8jax.models.subclass import subclass as _subclass
from fp8jax.recipe import Recipe
from fp8jax.scaled import quantize, value

# The scaling state of `layer.kernel` is `layer.kernel__fp8_scale` and so on.
STATE = "__fp8_"


class FP8State(nnx.Variable):
    """An array of a dot's scaling state, see `fp8jax.dot.init_state`; stacked as the kernel is."""


class Frozen(nnx.Variable):
    """A parameter that is not trained, of a model with adapters; stacked as it was."""


class LossScale(nnx.Variable):
    """The loss scale of a model whose GEMMs are float16, see `fp8jax.loss_scale`."""


def is_module(model: Any) -> bool:
    """Whether `model` is an NNX module."""
    return isinstance(model, nnx.Module)


MATCHED = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, ExpertDense)

# Layers that multiply but stay as they are; the report says why.
LEFT_ALONE = {
    nnx.Conv: "convolutions stay as they are",
    nnx.ConvTranspose: "convolutions stay as they are",
    nnx.Embed: "embeddings stay as they are",
    nnx.LoRA: "adapters stay as they are",
    ExpertRouter: "routers stay in float32",
}


def transform(
    model: nnx.Module,
    recipe: Recipe,
    rules: tuple[Rule, ...],
    backend: str,
    checkpointing: blocks.Checkpointing | None = None,
    attention: str | None = None,
) -> nnx.Module:
    """See `fp8jax.transform`."""
    return transform_as_chosen(model, Rules(recipe, rules), backend, checkpointing, attention)


def transform_as_chosen(
    model: nnx.Module,
    chosen: Rules,
    backend: str,
    checkpointing: blocks.Checkpointing | None,
    attention: str | None,
) -> nnx.Module:
    """`transform` with rules that may freeze kernels."""
    backends.choose(backend)
    copy: Any = nnx.clone(model)
    recipe, paths = chosen.recipe, []
    for path, layer in layers_of(copy, MATCHED):
        if hasattr(layer, "how__fp8"):
            raise ValueError(f"`model`: layer {path!r} is transformed already; transform the plain model.")
        paths.append(path)
        _convert(layer, path, chosen, backend)
    for path, layer in layers_of(copy, nnx.Embed):
        choice = chosen.choose_attend(Layer(f"{path}.attend", layer, layer.embedding.shape[::-1]))
        if choice is not None:
            paths.append(f"{path}.attend")
            layer.how__fp8 = _How(choice.recipe, backend, f"{path}.attend", None)
            _add_state(layer, "embedding", choice.recipe, ())
            _change_class(layer, _attending)
    chosen.check(paths)
    if recipe.gemm == "FP16":
        copy.loss_scale__fp8 = LossScale(loss_scale.init())
    attention_layers.replace(copy, attention)
    if checkpointing is not None:
        found = blocks_nnx.find(copy, checkpointing, _is_layer, _stack_of)
        blocks_nnx.checkpoint(copy, found, checkpointing)
    return copy


def _is_layer(module: Any) -> bool:
    return isinstance(module, (*MATCHED, *LEFT_ALONE))


def _stack_of(layer: Any) -> int:
    is_stack = isinstance(layer, MATCHED) and layer.kernel.ndim > rank_of(layer) + isinstance(
        layer, ExpertDense
    )
    return layer.kernel.shape[0] if is_stack else 0


def layers_of(model: nnx.Module, kinds: Any) -> list[tuple[str, Any]]:
    """The modules of these classes within a module, by path."""
    modules = [("/".join(map(str, parts)), layer) for parts, layer in nnx.iter_modules(model)]
    return [(path, layer) for path, layer in modules if isinstance(layer, kinds)]


def _convert(layer: Any, path: str, rules: Rules, backend: str) -> None:
    """Makes the layer one that multiplies under its recipe."""
    rank = rank_of(layer)
    stack = layer.kernel.shape[: layer.kernel.ndim - rank]
    recipe, reason = _choose(layer, path, _kernel_shape(layer), rules)
    if reason is None:
        _add_state(layer, "kernel", recipe, stack)
        if recipe.weight != "FP32":
            format, blocks = formats.get(recipe.weight), (*stack, *(1,) * rank)
            layer.kernel.set_value(
                quantize(layer.kernel.get_value(), format, power_of_two=True, blocks=blocks)
            )
    layer.how__fp8 = _How(recipe, backend, path, reason)
    if reason is None or (recipe.gemm in GEMM_DTYPES and not _has_own_dot(layer)):
        _change_class(layer, _multiplying)


def _add_state(layer: Any, kernel: str, recipe: Recipe, stack: tuple[int, ...]) -> None:
    for name, state in init_state(recipe).items():
        setattr(layer, f"{kernel}{STATE}{name}", FP8State(jnp.broadcast_to(state, (*stack, *state.shape))))


def _choose(layer: Any, path: str, kernel_shape: tuple[int, ...], rules: Rules) -> Choice:
    if _has_own_dot(layer):
        return Choice(rules.recipe, OWN_DOT)
    choice = rules.choose(Layer(path, layer, kernel_shape))
    is_einsum = isinstance(layer, nnx.Einsum) and choice.reason is None and layer.einsum_str
    if is_einsum and not is_dot(layer.einsum_str):
        return Choice(choice.recipe, "the einsum is not a single dot product")
    return choice


def report(model: nnx.Module, *args: Any, **kwargs: Any) -> Report:
    """See `fp8jax.report`."""
    copy, rows, hows = _named(model)
    attention, attentions = attention_layers.noted(copy)
    graph, state = nnx.split(copy)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        return nnx.merge(graph, state)(*args, **kwargs)

    jaxpr = trace(call, state, *args, **kwargs)
    recipes = [how.recipe for how in hows]
    notes = [backends.note(hows[0].backend), *blocks.lines(*blocks_nnx.checkpointed(copy))]
    notes += attention_layers.lines(attention, attentions)
    return measured(str(max(recipes, key=recipes.count)), rows, jaxpr, "\n".join(filter(None, notes)))


def recipes(model: nnx.Module) -> list[Recipe]:
    """Those of a module's transformed layers; empty if it is plain."""
    return [layer.how__fp8.recipe for _, layer in layers_of(model, object) if hasattr(layer, "how__fp8")]


def named(model: nnx.Module) -> nnx.Module:
    """A copy of a transformed module whose programs name the layer of each product, see `report.layer_of`."""
    return _named(model)[0]


def _named(model: nnx.Module) -> tuple[nnx.Module, Rows, "list[_How]"]:
    """The copy, a row for each of its layers, and how those that were transformed multiply."""
    copy, rows, hows = nnx.clone(model), {}, []
    for path, layer in layers_of(copy, (*MATCHED, *LEFT_ALONE)):
        how, shape, reason = getattr(layer, "how__fp8", None), (), None
        if how is not None:
            path, reason = how.path, how.reason
            table = isinstance(layer, nnx.Embed)
            shape = layer.embedding.shape[::-1] if table else _kernel_shape(layer)
            hows.append(how)
        else:
            kinds = [kind for kind in LEFT_ALONE if isinstance(layer, kind)]
            reason = LEFT_ALONE[kinds[0]] if kinds else "the layer is not transformed"
        kind = type(layer).__name__
        lora = layer.lora_a.shape[-1] if how and how.lora_scale is not None else 0
        rows[path] = Row(path, kind, tuple(shape), reason is None, reason or "", lora=lora)
        layer.path__fp8 = path
        _change_class(layer, _scoped)
    if not hows:
        raise TypeError("`model`: expected what fp8jax.transform made; no layer of it is transformed.")
    return copy, rows, hows


def dequantize(model: nnx.Module) -> nnx.Module:
    """See `fp8jax.dequantize`."""
    copy: Any = nnx.clone(model)
    attention_layers.restore(copy)
    blocks_nnx.restore(copy)
    for _, layer in layers_of(copy, (*MATCHED, nnx.Embed)):
        how = vars(layer).get("how__fp8")
        if how is None:
            continue
        if not isinstance(layer, nnx.Embed):
            layer.kernel.set_value(value(layer.kernel.get_value()))
        for name in [name for name in vars(layer) if name.endswith("__fp8") or STATE in name]:
            delattr(layer, name)
        # A class of the user's may have the name of its base: only what `transform` made is undone.
        _change_class(layer, lambda cls: vars(cls).get("plain__fp8", cls))
    if hasattr(copy, "loss_scale__fp8"):
        del copy.loss_scale__fp8
    return copy


def freeze(model: nnx.Module) -> nnx.Module:
    """See `fp8jax.freeze`."""
    copy: Any = nnx.clone(model)
    for _, layer in layers_of(copy, MATCHED):
        how = getattr(layer, "how__fp8", None)
        if how is not None and how.reason is None:
            kernel, state = layer.kernel.get_value(), _state_of(layer)
            layer.kernel.set_value(quantized_kernel(kernel, how.recipe, state, rank_of(layer)))
    return copy


def rank_of(layer: Any) -> int:
    """The rank of one kernel; a stack of layers, made under `nnx.vmap`, has more axes in front, and so
    have the kernels of experts."""
    if isinstance(layer, nnx.Einsum):
        return len(layer.kernel_shape)
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    return 2


def _kernel_shape(layer: Any) -> tuple[int, ...]:
    """Of one layer of a stack, all of its experts."""
    return tuple(layer.kernel.shape[-rank_of(layer) - isinstance(layer, ExpertDense) :])


def _has_own_dot(layer: Any) -> bool:
    if isinstance(layer, ExpertDense):
        return layer.ragged_dot is not exchange.ragged_dot
    if isinstance(layer, nnx.Einsum):
        return layer.einsum_op is not jnp.einsum
    if getattr(layer, "dot_general_cls", None) is not None:
        return True
    return layer.dot_general not in (None, jax.lax.dot_general)


@dataclasses.dataclass(frozen=True)
class _How:
    """How a layer multiplies: a constant of the model's graph."""

    recipe: Recipe
    backend: str
    path: str
    reason: str | None  # why not in FP8
    lora_scale: float | None = None  # of the product of its adapters, if it has some


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
    how = layer.how__fp8
    if how.reason is None:
        multiply = FP8Dot(how.recipe, how.backend, functools.partial(_state_of, layer), layer.param_dtype)
    else:
        multiply = WideDot(GEMM_DTYPES[how.recipe.gemm], layer.param_dtype)
    if how.lora_scale is not None:
        adapters = layer.lora_a.get_value(), layer.lora_b.get_value()
        multiply = AdaptedDot(multiply, adapters, how.lora_scale)
    inputs, kernel, bias = multiply.operands(*operands, dtype=dtype)
    return inputs, _Operand(kernel, multiply), bias


def _state_of(layer: Any, kernel: str = "kernel") -> dict[str, jax.Array]:
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
    state = functools.partial(_state_of, layer, "embedding")
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
def _multiplying(cls: type) -> type:
    """A subclass whose layers multiply as their `how__fp8` says."""
    return _subclass(cls, _SEAMS)


@functools.cache
def _attending(cls: type) -> type:
    """A subclass of an embedding whose `attend` multiplies in FP8."""
    return _subclass(cls, {"attend": _attend})


@functools.cache
def _scoped(cls: type) -> type:
    """A subclass whose products are counted as those of its `path__fp8`."""

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(layer.path__fp8):
            return cls.__call__(layer, *args, **kwargs)

    def attend(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(layer.path__fp8):
            return cls.attend(layer, *args, **kwargs)

    return _subclass(cls, {"__call__": call, **({"attend": attend} if hasattr(cls, "attend") else {})})
