"""An NNX module whose parameters are frozen and whose adapters are trained.

    model = fp8jax.transform(pretrained, "O2", lora=fp8jax.LoRA(rank=8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

In the copy that `transform` makes the module's own parameters are `Frozen` variables, which are no
`nnx.Param`s; the adapters, `layer.lora_a` and `layer.lora_b`, are `nnx.LoRAParam`s, which are. So optimizers,
gradients and `nnx.Param` filters see the adapters alone.
"""

import math
from typing import Any

import jax
from flax import nnx

from fp8jax.adapters.nnx.module import (
    check_module,
    kernels_of,
    placed_kernels,
    plain_module,
    settings_of,
    with_recipe,
)
from fp8jax.adapters.nnx.variables import CLASS, Frozen, modules_of, places_of, thaw
from fp8jax.dot.einsum import is_single_dot
from fp8jax.rewrite import LoRA, Settings
from fp8jax.rewrite.lora import A, B


def transform(model: nnx.Module, settings: Settings, inputs: tuple[Any, ...] | None = None) -> nnx.Module:
    """See `fp8jax.transform`."""
    copy: Any = with_recipe(model, settings, inputs)
    return copy if settings.lora is None else _adapted(copy, settings, settings.lora)


def _adapted(copy: Any, settings: Settings, lora: LoRA) -> nnx.Module:
    """Freezes the parameters of a transformed module, and adds adapters to it."""
    for _, variable in list(nnx.iter_graph(copy)):
        if isinstance(variable, nnx.Param):
            if type(variable) is not nnx.Param:
                variable.set_metadata(CLASS, type(variable))
            object.__setattr__(variable, "__class__", Frozen)
    able, key = [], jax.random.key(lora.seed)
    for path, kernel, (owner, _, param) in placed_kernels(copy):
        layer = "/".join(path[:-1])
        shape = param.shape[len(param.shape) - kernel.rank :]
        sides = None if kernel.groups else _sides(owner, shape)
        if sides is not None:
            able.append(layer)
        if sides is not None and lora.chooses(layer, settings.recipe):
            stack = param.shape[: len(param.shape) - kernel.rank]
            for name, new in lora.new(key, layer, stack, (0, *sides)).items():
                setattr(owner, name, nnx.LoRAParam(new))
        param.set_value(lora.narrow(param.get_value(), kernel.recipe, kernel.rank))
    layers = {"/".join(map(str, parts)) for parts, module in modules_of(copy) if hasattr(module, "kernel")}
    lora.check(able, sorted(layers - set(able)))
    return copy


def is_adapted(model: nnx.Module) -> bool:
    """Whether `transform` gave a module adapters."""
    return bool(kernels_of(model)) and settings_of(model).lora is not None


def dequantize(model: nnx.Module) -> nnx.Module:
    """The plain NNX module of a transformed one: its own class, dequantized kernels, no scaling state.

    Adapters are merged into the kernels, see `merge`.

    Raises:
        TypeError: `model` is not an NNX module.
    """
    check_module(model, "dequantize(variables)")
    return merge(model) if is_adapted(model) else plain_module(model)


def merge(model: Any, base: Any = None) -> nnx.Module:
    """The plain NNX module with the adapters merged into its kernels, W + (alpha / rank) A B.

    Args:
        model: an NNX module from `transform(..., lora=...)`.
        base: the plain module that `model` was made from. Without it W is the frozen kernel, rounded to its
            storage format.

    Raises:
        TypeError: `model` has no adapters.
        ValueError: `base` is another module.
    """
    lora, adapters = _adapters(model)
    if base is not None:
        return _with_adapters(_checked("base", base, adapters, model), lora, adapters, 1.0)
    copy: Any = nnx.clone(model)
    for _, module in modules_of(copy):
        for name in (A, B):
            if isinstance(vars(module).get(name), nnx.LoRAParam):
                delattr(module, name)
    thaw(copy)
    return _with_adapters(plain_module(copy), lora, adapters, 1.0)


def unmerge(merged: nnx.Module, model: nnx.Module) -> nnx.Module:
    """The inverse of `merge`: a copy of a plain NNX module without the adapters of `model`."""
    lora, adapters = _adapters(model)
    return _with_adapters(_checked("merged", merged, adapters, model), lora, adapters, -1.0)


def _checked(argument: str, plain: Any, adapters: Any, model: nnx.Module) -> nnx.Module:
    """The plain module, if it has the layers that have adapters in `model`."""
    if not isinstance(plain, nnx.Module):
        raise TypeError(f"`{argument}`: expected an NNX module; got {type(plain).__name__}.")
    shapes, own = _shapes(plain), _shapes(model)
    for path in adapters:
        if shapes.get(path) != own[path]:
            raise ValueError(
                f"`{argument}`: expected the module that was adapted, which has layer "
                f"{'/'.join(path[:-1])!r} with a kernel of shape {own[path]}; got {shapes.get(path, 'none')}."
            )
    return plain


def _shapes(model: nnx.Module) -> dict[tuple[str, ...], tuple[int, ...]]:
    return {path: place.param.shape for path, place in places_of(model).items()}


def _adapters(model: nnx.Module) -> tuple[LoRA, dict[tuple[str, ...], dict[str, jax.Array]]]:
    """How, and the adapters by the kernel's path."""
    if not isinstance(model, nnx.Module) or not is_adapted(model):
        raise TypeError(
            f"`model`: expected an NNX module that fp8jax.transform(..., lora=...) made; got "
            f"{type(model).__name__}. Of a Linen model, call `model.merge(variables)`."
        )
    lora = settings_of(model).lora
    assert lora is not None
    return lora, {
        path: {name: getattr(owner, name).get_value() for name in (A, B)}
        for path, _, (owner, _, _) in placed_kernels(model)
        if isinstance(vars(owner).get(A), nnx.LoRAParam)
    }


def _with_adapters(plain: nnx.Module, lora: LoRA, adapters: Any, times: float) -> nnx.Module:
    """A copy of a plain module with adapters added to its kernels."""
    copy: Any = nnx.clone(plain)
    places = places_of(copy)
    for path, own in adapters.items():
        param = places[path].param
        param.set_value(lora.added(param.get_value(), own, times))
    return copy


def _sides(layer: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Inputs and outputs of a layer's kernel; None if it is no matrix of them."""
    if isinstance(layer, nnx.Linear):
        return shape[0], shape[1]
    if isinstance(layer, nnx.LinearGeneral) and not layer.batch_axis:
        return math.prod(shape[: len(layer.in_features)]), math.prod(shape[len(layer.in_features) :])
    if not isinstance(layer, nnx.Einsum) or not layer.einsum_str:
        return None
    subscripts = layer.einsum_str.replace(" ", "")
    if not is_single_dot(subscripts):
        return None
    (left, right), out = subscripts.partition("->")[0].split(","), subscripts.partition("->")[2]
    inputs = [c for c in right if c not in out]
    if any(c in left and c in out for c in right) or list(right[: len(inputs)]) != inputs:
        return None
    return math.prod(shape[: len(inputs)]), math.prod(shape[len(inputs) :])
