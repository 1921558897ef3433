"""Flax NNX modules under a recipe: the call of a module as a function of its parameters, rewritten.

    model = transform(module, settings)             # a new module; the user's module does not change
    loss, grads = value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)                  # an `nnx.Optimizer`

The modules of the copy get subclasses with rewritten calls (see `calls`). Attributes and parameters keep
their names. The scaling state of a kernel's dot product is stored next to the kernel, as `FP8State`s. They
are no `nnx.Param`s, so optimizers and plain gradients ignore them. `value_and_grad` updates them in place, as
NNX updates a BatchNorm's statistics.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from flax import nnx
from flax.nnx import bridge

from fp8jax import loss_scale
from fp8jax.adapters.flax_context import flax_context
from fp8jax.adapters.moe.nnx import ExpertDense, ExpertRouter
from fp8jax.adapters.nnx.calls import operands_of, restore, rewrite, rewritten_of, run_call
from fp8jax.adapters.nnx.variables import (
    STATE,
    FP8State,
    Frozen,
    LossScale,
    VariablePlace,
    modules_of,
    places_of,
)
from fp8jax.dot.layout import is_single_dot
from fp8jax.recipe import Recipe
from fp8jax.rewrite import SMALLEST, FunctionModel, Kernel, Layer, Report, Settings, can_be_kernel, layer_path
from fp8jax.variables import FROZEN, PARAMS

FLAX_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
_KNOWN = (*FLAX_LAYERS, ExpertDense)

# For a scaling state of another recipe, or none.
_REMEDY = (
    "Replace or move layers of an NNX module before `transform`. Give nnx.update the parameters alone, "
    "`nnx.state(old, nnx.Param)`, into a newly transformed model; if the weight formats differ, transform "
    "`fp8jax.adapters.nnx.dequantize(old)`."
)


def is_module(model: Any) -> bool:
    """Whether `model` is an NNX module."""
    return isinstance(model, nnx.Module)


def check_module(model: Any, of_linen: str) -> None:
    """Raises TypeError if `model` is not an NNX module; `of_linen` is the method of Linen models."""
    if not is_module(model):
        raise TypeError(
            f"`model`: expected an NNX module; got {type(model).__name__}. Of a Linen model, call "
            f"`model.{of_linen}`."
        )


def with_recipe(model: nnx.Module, settings: Settings, inputs: tuple[Any, ...] | None = None) -> nnx.Module:
    """A copy of the module under a recipe, without adapters; see `fp8jax.transform`."""
    copy: Any = nnx.clone(model)
    for path, module in modules_of(copy):
        if rewritten_of(module) is not None:
            raise ValueError(
                f"`model`: expected a plain module; got one whose layer {'/'.join(map(str, path))!r} is "
                "transformed already. Transform the original module, or "
                "`fp8jax.adapters.nnx.dequantize(model)`."
            )
    if inputs is None:
        kernels = _guessed_kernels(copy, settings)
    else:
        function = FunctionModel(run_call, settings, num_states=1, context=flax_context)
        rewrite(copy, function)
        variables, *operands = operands_of(copy, "__call__", inputs, {})
        kernels = function.kernels(variables.get(FROZEN, variables[PARAMS]), *operands)
        restore(copy)
    places = places_of(copy)
    for path, kernel in kernels.items():
        owner, name, param = places[path]
        for part, state in kernel.first_state(path).items():
            setattr(owner, f"{name}{STATE}{part}", FP8State(state))
        if kernel.recipe.weight != "FP32":
            param.set_value(kernel.in_format(param.get_value()))
    if settings.recipe.gemm == "FP16":
        copy.loss_scale__fp8 = LossScale(loss_scale.init())
    settings = settings._replace(kernels=kernels)
    rewrite(copy, FunctionModel(run_call, settings, num_states=1, context=flax_context, remedy=_REMEDY))
    return copy


def _guessed_kernels(model: nnx.Module, settings: Settings) -> dict[tuple[str, ...], Kernel]:
    """The parameters that dot products may use, by path, without a trace.

    Kernels of Flax's layers are stored in the recipe's weight format. In other modules each parameter with
    two or more axes gets a scaling state, and stays float32.
    """
    places, found, seen = places_of(model), {}, []
    kernels = [path for path, (_, _, param) in places.items() if can_be_kernel(param.get_value())]
    rules = settings.new_rules(kernels)
    for path, (module, _, param) in places.items():
        leaf, is_known = param.get_value(), isinstance(module, _KNOWN)
        if not (_may_multiply(module, leaf) and can_be_kernel(leaf)):
            continue
        groups = leaf.shape[-3] if isinstance(module, ExpertDense) else 0
        axes = _stacked_axes(module, leaf.shape)
        layers = tuple(leaf.shape[axis] for axis in axes)
        shape = tuple(dim for axis, dim in enumerate(leaf.shape) if axis not in axes)
        layer = Layer(layer_path(path), module, shape, layers, "/".join(path))
        choice = rules.choose(layer)
        seen.append(layer)
        # The sides of an einsum's kernel may depend on its call.
        has_sides = is_known and not isinstance(module, nnx.Einsum)
        both = sides(module, shape[bool(groups) :]) if has_sides else None
        is_small = both is not None and min(both) < SMALLEST
        is_skipped = (is_small or isinstance(module, nnx.Embed)) and not rules.names(layer)
        if choice.is_high_precision or (choice.reason is None and not is_skipped):
            recipe = choice.recipe if is_known else choice.recipe.with_plain_weights()
            batch = bool(groups) + (_batch_axes(module) if is_known else 0)
            matrix = both or (math.prod(shape[batch:]),)
            found[path] = Kernel(recipe, layers, groups, axes, matrix)
    rules.check(seen)
    if settings.recipe.is_quantized and not found:
        raise ValueError(
            "`model`: expected a kernel that can multiply in FP8; got none of "
            f"{', '.join(layer.path for layer in seen) or 'any path'}. Give a rule for those that shall, "
            '`rules=[fp8jax.Rule("PATH", "te")]`, or use the recipe bf16.'
        )
    return found


def _may_multiply(module: Any, leaf: Any) -> bool:
    """Whether an FP8 dot product may use a parameter: not those of routers, nor of Flax's norms. A layer's
    kernel has more axes than the layer's bias."""
    if isinstance(module, _KNOWN):
        ranks = [param.ndim for param in vars(module).values() if isinstance(param, nnx.Param | Frozen)]
        return leaf.ndim == max(ranks)
    is_flax = type(module).__module__.startswith("flax.") and not isinstance(module, bridge.ToNNX)
    return isinstance(module, nnx.Embed) or not (is_flax or isinstance(module, ExpertRouter))


def _stacked_axes(layer: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a stack of layers, made by `nnx.vmap`, in a kernel: those that leave a kernel of the
    layer's sizes, or the first axes."""
    if isinstance(layer, nnx.Linear):
        own = (layer.in_features, layer.out_features)
    elif isinstance(layer, nnx.LinearGeneral):
        own = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
    elif isinstance(layer, nnx.Einsum):
        own = tuple(layer.kernel_shape)
    elif isinstance(layer, ExpertDense):
        own = shape[-3:]
    else:
        own = shape
    for axes in itertools.combinations(range(len(shape)), len(shape) - len(own)):
        if tuple(dim for axis, dim in enumerate(shape) if axis not in axes) == own:
            return axes
    return tuple(range(len(shape) - len(own)))


def sides(layer: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Inputs and outputs of a layer's kernel; None for an einsum if its kernel is not such a matrix."""
    inputs = 1
    if isinstance(layer, nnx.LinearGeneral):
        shape, inputs = shape[len(layer.batch_axis) :], len(layer.in_features)
    elif isinstance(layer, nnx.Einsum):
        subscripts = (layer.einsum_str or "").replace(" ", "")
        if not is_single_dot(subscripts):
            return None
        operands, _, out = subscripts.partition("->")
        left, right = operands.split(",")
        inputs = sum(c not in out for c in right)
        is_batched = any(c in left and c in out for c in right)
        if is_batched or any(c in out for c in right[:inputs]):
            return None
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])


def _batch_axes(layer: Any) -> int:
    """The number of axes of a layer's kernel, in front of its matrix, that batch its dot product."""
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis)
    if not isinstance(layer, nnx.Einsum):
        return 0
    operands, _, out = (layer.einsum_str or "").replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    return len(list(itertools.takewhile(lambda c: c in left and c in out, right)))


# A transformed module ############################################################################


def report(model: nnx.Module, *args: Any, method: str = "__call__", **kwargs: Any) -> Report:
    """See `fp8jax.report`."""
    rewritten = rewritten_of(model)
    if rewritten is None:
        raise TypeError("`model`: expected what fp8jax.transform made; no layer of it is transformed.")
    return rewritten.function.report(*operands_of(model, method, args, kwargs))


def recipes(model: nnx.Module) -> list[Recipe]:
    """The recipes of a module's kernels; empty for a plain module."""
    return [kernel.recipe for _, kernel, _ in placed_kernels(model)]


def placed_kernels(model: nnx.Module) -> Iterator[tuple[tuple[str, ...], Kernel, VariablePlace]]:
    """The kernels of a transformed module, with their paths and places; none for a plain module.

    A layer that was removed since `transform` has none.
    """
    rewritten, places = rewritten_of(model), places_of(model)
    kernels = {} if rewritten is None else rewritten.function.settings.kernels or {}
    for path, kernel in kernels.items():
        if path in places:
            yield path, kernel, places[path]


def freeze(model: nnx.Module) -> nnx.Module:
    """A copy of a transformed NNX module for repeated inference, with kernels in their GEMMs' format.

    The copy returns the same outputs and casts no kernel. Do not train it.

    Raises:
        TypeError: `model` is not an NNX module.
    """
    check_module(model, "freeze(variables, *inputs)")
    copy: Any = nnx.clone(model)
    for path, kernel, (owner, name, param) in placed_kernels(copy):
        if kernel.recipe.is_quantized and isinstance(owner, _KNOWN):
            parts = kernel.first_state(path)
            state = {part: getattr(owner, f"{name}{STATE}{part}").get_value() for part in parts}
            param.set_value(kernel.for_inference(param.get_value(), state))
    return copy
