"""Flax NNX modules under a recipe: the call of a module as a function of its parameters, rewritten.

    model = transform(module, settings)             # a new module; the user's is untouched
    loss, grads = value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)                  # an `nnx.Optimizer`

The modules of the copy get other classes, subclasses of their own. The outermost call of one is traced with
plain arrays for parameters and evaluated with FP8 dot products; calls within it are part of that. Attributes
and parameters keep their names. Beside a kernel stands the scaling state of its dot product, `FP8State`s.
They are no `nnx.Param`s, so optimizers and plain gradients pass them by; `value_and_grad` gives them their
new values in place, as NNX does with a BatchNorm's statistics.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx import bridge

from fp8jax import formats, loss_scale
from fp8jax.adapters.moe.nnx import ExpertDense, ExpertRouter
from fp8jax.adapters.nnx.calls import operands_of, plain_method, restored, rewrite, rewritten_of, run_call
from fp8jax.adapters.nnx.variables import STATE, FP8State, LossScale, Place, modules_of, places_of
from fp8jax.dot import quantized_kernel
from fp8jax.quantization import own_value, quantize
from fp8jax.recipe import Recipe
from fp8jax.rewrite import SMALLEST, FunctionModel, Kernel, Layer, Report, Settings, is_array, is_wide

_KNOWN = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, ExpertDense)


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
    settings.chosen()
    copy: Any = nnx.clone(model)
    for path, module in modules_of(copy):
        if rewritten_of(module) is not None:
            raise ValueError(
                f"`model`: expected a plain module; got one whose layer {'/'.join(map(str, path))!r} is "
                "transformed already. Transform the original module, or "
                "`fp8jax.adapters.nnx.dequantize(model)`."
            )
    if inputs is None:
        kernels = _kernels(copy, settings)
    else:
        rewrite(copy, FunctionModel(run_call, settings, own=2))
        rewritten = rewritten_of(copy)
        assert rewritten is not None
        _, operands = operands_of(rewritten, plain_method(copy, "__call__"), copy, inputs, {})
        kernels = rewritten.function.kernels(*operands)
        copy = restored(copy)
    places = places_of(copy)
    for path, kernel in kernels.items():
        owner, name, param = places[path]
        for part, state in kernel.first_state(param.shape).items():
            setattr(owner, f"{name}{STATE}{part}", FP8State(state))
        if kernel.recipe.weight != "FP32":
            format = formats.get(kernel.recipe.weight)
            blocks = kernel.blocks(param.shape)
            q = quantize(param.get_value(), format, power_of_two=True, blocks=blocks)
            param.set_value(q.with_own_dtype(param.dtype))
    if settings.recipe.gemm == "FP16":
        copy.loss_scale__fp8 = LossScale(loss_scale.init())
    rewrite(copy, FunctionModel(run_call, settings._replace(kernels=kernels), own=2))
    return copy


def _kernels(model: nnx.Module, settings: Settings) -> dict[tuple[str, ...], Kernel]:
    """The parameters that dot products may take, by path.

    No inputs are known here: what Flax's own layers multiply with is stored in the recipe's weight format; of
    other modules each parameter of two or more axes has a scaling state, and stays float32.
    """
    rules, found, paths = settings.chosen(), {}, []
    for path, (module, name, param) in places_of(model).items():
        leaf, is_known = param.get_value(), isinstance(module, _KNOWN)
        if not _may_multiply(module) or (is_known and name != "kernel"):
            continue
        if not is_array(leaf) or leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        rank = _rank(module) if is_known else leaf.ndim
        groups = leaf.shape[-3] if isinstance(module, ExpertDense) else 0
        shape = tuple(leaf.shape[leaf.ndim - rank - bool(groups) :])
        layer = Layer.of(path, module, shape)
        choice = rules.choose(layer)
        paths.append(layer.path)
        is_table = isinstance(module, nnx.Embed)
        is_small = is_known and min(_sides(module, shape)) < SMALLEST
        is_left = (is_table or is_small) and choice.reason is None and not rules.names(layer)
        if is_left or (choice.reason is not None and not is_wide(choice)):
            continue
        recipe = choice.recipe if is_known else choice.recipe.with_plain_weights()
        found[path] = Kernel(recipe, rank, groups)
    rules.check(paths)
    if settings.recipe.gemm == "FP8" and not found:
        raise ValueError(
            "`model`: expected a kernel that can multiply in FP8; got none of "
            f"{', '.join(paths) or 'any path'}. Give a rule for those that shall, "
            '`rules=[fp8jax.Rule("PATH", "te")]`, or use the recipe bf16.'
        )
    return found


def _may_multiply(module: Any) -> bool:
    """Whether a module may multiply with its parameters: of Flax's own, layers do, norms do not."""
    is_flax = type(module).__module__.startswith("flax.") and not isinstance(module, bridge.ToNNX)
    return isinstance(module, (*_KNOWN, nnx.Embed)) or not (is_flax or isinstance(module, ExpertRouter))


def _rank(layer: Any) -> int:
    """The rank of one kernel; a stack of layers, made under `nnx.vmap`, has more axes in front, and so
    have the kernels of experts."""
    if isinstance(layer, nnx.Einsum):
        return len(layer.kernel_shape)
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    return 2


def _sides(layer: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a kernel; of an einsum not known before its call."""
    if isinstance(layer, nnx.Einsum):
        return SMALLEST, SMALLEST
    split = -1
    if isinstance(layer, nnx.LinearGeneral):
        split = len(layer.batch_axis) + len(layer.in_features)
        shape, split = shape[len(layer.batch_axis) :], split - len(layer.batch_axis)
    return math.prod(shape[:split]), math.prod(shape[split:])


# A transformed module ############################################################################


def report(model: nnx.Module, *args: Any, method: str = "__call__", **kwargs: Any) -> Report:
    """See `fp8jax.report`."""
    rewritten = rewritten_of(model)
    if rewritten is None:
        raise TypeError("`model`: expected what fp8jax.transform made; no layer of it is transformed.")
    _, operands = operands_of(rewritten, plain_method(model, method), model, args, kwargs)
    return rewritten.function.report(*operands)


def recipes(model: nnx.Module) -> list[Recipe]:
    """Those of a module's kernels; empty if it is plain."""
    rewritten = rewritten_of(model)
    return [] if rewritten is None else [kernel.recipe for kernel in kernels_of(model).values()]


def settings_of(model: nnx.Module) -> Settings:
    """How a transformed module is rewritten."""
    rewritten = rewritten_of(model)
    assert rewritten is not None
    return rewritten.function.settings


def kernels_of(model: nnx.Module) -> dict[tuple[str, ...], Kernel]:
    """The kernels of a transformed module, by path."""
    rewritten = rewritten_of(model)
    return {} if rewritten is None else dict(rewritten.function.settings.kernels or {})


def placed_kernels(model: nnx.Module) -> Iterator[tuple[tuple[str, ...], Kernel, Place]]:
    """The kernels of a transformed module, each with its path and its place."""
    places = places_of(model)
    for path, kernel in kernels_of(model).items():
        yield path, kernel, places[path]


def plain_module(model: nnx.Module) -> nnx.Module:
    """The plain module of a transformed one without adapters."""
    copy: Any = nnx.clone(model)
    for _, _, (_, _, param) in placed_kernels(copy):
        param.set_value(own_value(param.get_value()))
    return restored(copy)


def freeze(model: nnx.Module) -> nnx.Module:
    """A copy of a transformed NNX module for repeated inference, with kernels in their GEMMs' format.

    The copy returns the same outputs and casts no kernel. Do not train it.

    Raises:
        TypeError: `model` is not an NNX module.
    """
    check_module(model, "freeze(variables, *inputs)")
    copy: Any = nnx.clone(model)
    for _, kernel, (owner, name, param) in placed_kernels(copy):
        if kernel.recipe.gemm == "FP8" and isinstance(owner, _KNOWN):
            state = {part: getattr(owner, f"{name}{STATE}{part}").get_value() for part in kernel.parts}
            leaf = quantized_kernel(param.get_value(), kernel.recipe, state, kernel.rank)
            param.set_value(leaf)
    return copy
