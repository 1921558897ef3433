"""The FP8 copy of an NNX module, and back; and `NNXModel`, a transformed module as a function."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8jax.adapters.nnx.calls import rewritten_of
from fp8jax.adapters.nnx.lora import adapt, lora_of, merge, plain_module
from fp8jax.adapters.nnx.module import check_module, freeze, placed_kernels, report, with_recipe
from fp8jax.adapters.nnx.variables import FP8State, put_in, tree_of
from fp8jax.rewrite import Kernel, Report, Settings
from fp8jax.variables import PARAMS, SCALING, STATISTICS

# The variables of an `NNXModel`.
_COLLECTIONS = {PARAMS: nnx.Param, SCALING: FP8State, STATISTICS: nnx.BatchStat}


def transform(model: nnx.Module, settings: Settings, inputs: tuple[Any, ...] | None = None) -> nnx.Module:
    """See `fp8jax.transform`."""
    copy = with_recipe(model, settings, inputs)
    if settings.lora is not None:
        adapt(copy, settings, settings.lora)
    return copy


def dequantize(model: nnx.Module) -> nnx.Module:
    """The plain NNX module of a transformed one: its own class, dequantized kernels, no scaling state.

    Adapters are merged into the kernels, see `merge`.

    Raises:
        TypeError: `model` is not an NNX module.
    """
    check_module(model, "dequantize(variables)")
    return plain_module(model) if lora_of(model) is None else merge(model)


@dataclasses.dataclass(frozen=True, eq=False)
class NNXModel:
    """A transformed module, of arrays or shapes, as a function of variables that are nested dicts, as
    `LinenModel` is one. Its own variables stay as they are."""

    module: nnx.Module

    @property
    def settings(self) -> Settings:
        """The recipe, rules, GEMM backend and adapters."""
        rewritten = rewritten_of(self.module)
        assert rewritten is not None
        return rewritten.function.settings

    def plain(self) -> nnx.Module:
        """A copy of the module in high precision, without adapters."""
        return plain_module(self.module)

    def init_with_inputs(self, *args: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The module's variables, with zeros for shapes, and all arguments."""
        return _arrays(self.split()[0]), args

    def split(self, *args: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The module's parameters, scaling states and statistics, and all arguments."""
        _, *states, _ = nnx.split(self.module, *_COLLECTIONS.values(), ...)
        return dict(zip(_COLLECTIONS, map(tree_of, states), strict=True)), args

    def apply(self, variables: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The call of a copy of the module with these variables."""
        graph, *states, others = nnx.split(self.module, *_COLLECTIONS.values(), ...)
        inside = (put_in(state, variables[name]) for name, state in zip(_COLLECTIONS, states, strict=True))
        # Copies, which belong to the trace of this call, so that the call may change them.
        copy: Any = nnx.merge(graph, *inside, _arrays(others))
        return copy(*args, **kwargs)

    def kernels(self, variables: Any, *args: Any, **kwargs: Any) -> dict[tuple[str, ...], Kernel]:
        """The module's kernels by path; raises TypeError for a keyword that its call does not have."""
        del variables, args
        if kwargs:
            inspect.signature(self.module.__call__).bind_partial(**kwargs)  # pyright: ignore
        return {path: kernel for path, kernel, _ in placed_kernels(self.module)}

    def freeze(self, variables: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The variables of the frozen module; `variables` are the module's."""
        del args, kwargs
        return {**variables, **NNXModel(freeze(self.module)).split()[0]}

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """See `fp8jax.report`."""
        return report(self.module, *args, **kwargs)


def _arrays(tree: Any) -> Any:
    """A copy of the tree, with zeros for shapes."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, tree
    )
