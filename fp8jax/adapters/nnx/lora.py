"""NNX modules with frozen parameters and trained adapters.

    model = fp8jax.transform(pretrained, "O2", lora=fp8jax.LoRA(rank=8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

In the copy that `transform` makes, the module's own parameters are `Frozen` variables, which are no
`nnx.Param`s. The adapters, `layer.lora_a` and `layer.lora_b`, are `nnx.LoRAParam`s, which are. So optimizers,
gradients and `nnx.Param` filters see the adapters alone.
"""

from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from fp8jax.adapters.moe.nnx import ExpertDense
from fp8jax.adapters.nnx.calls import restore, rewritten_of
from fp8jax.adapters.nnx.module import FLAX_LAYERS, placed_kernels, sides
from fp8jax.adapters.nnx.variables import CLASS, Frozen, modules_of, places_of, thaw
from fp8jax.quantization import own_value
from fp8jax.rewrite import SMALLEST, Layer, LoRA, Settings
from fp8jax.rewrite.lora import A, B

# Shape of the kernel and its adapters, by the kernel's path.
_Adapters = dict[tuple[str, ...], tuple[tuple[int, ...], Any]]


def adapt(model: nnx.Module, settings: Settings, lora: LoRA) -> None:
    """Freezes the parameters of a transformed module, and adds adapters."""
    for _, variable in list(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param):
            if type(variable) is not nnx.Param:
                variable.set_metadata(CLASS, type(variable))
            object.__setattr__(variable, "__class__", Frozen)
    able, key = [], jax.random.key(lora.seed)
    rules = settings.new_rules(path for path, *_ in placed_kernels(model))
    for path, kernel, (owner, _, param) in placed_kernels(model):
        layer, depth = "/".join(path[:-1]), len(kernel.layers)
        is_matrix = isinstance(owner, FLAX_LAYERS) and not getattr(owner, "batch_axis", ())
        is_matrix = is_matrix and kernel.stacked == tuple(range(depth))
        found = sides(owner, param.shape[depth:]) if is_matrix else None
        own = Layer(layer, owner, param.shape[depth:], kernel.layers, "/".join(path))
        # Only of an einsum a small kernel, which no dot product uses in FP8, is among the kernels.
        is_small = found is not None and kernel.recipe.is_quantized and min(found) < SMALLEST
        if found is not None and not (is_small and not rules.names(own)):
            able.append(layer)
            if lora.chooses(layer, "/".join(path), settings.recipe):
                for name, new in lora.new(key, layer, kernel.layers, (0, *found)).items():
                    setattr(owner, name, nnx.LoRAParam(new))
        param.set_value(lora.freeze(param.get_value(), kernel, found[0] if found else None))
    kinds = (*FLAX_LAYERS, nnx.Conv, nnx.ConvTranspose, ExpertDense)
    layers = {"/".join(map(str, path)) for path, module in modules_of(model) if isinstance(module, kinds)}
    lora.check(able, sorted(layers - set(able)))


def merge(model: nnx.Module, base: nnx.Module | None = None) -> nnx.Module:
    """The plain NNX module with the adapters merged into its kernels, W + (alpha / rank) A B.

    Args:
        model: an NNX module from `transform(..., lora=...)`.
        base: the plain module that `model` was made from. Without it W is the frozen kernel, rounded to its
            storage format.

    Raises:
        TypeError: `model` has no adapters.
        ValueError: `base` is another module.
    """
    adapters = _adapters(model)
    return _added(plain_module(model) if base is None else base, "base", adapters, 1.0)


def unmerge(merged: nnx.Module, model: nnx.Module) -> nnx.Module:
    """The inverse of `merge`: a copy of a plain NNX module without the adapters of `model`."""
    return _added(merged, "merged", _adapters(model), -1.0)


def plain_module(model: nnx.Module) -> nnx.Module:
    """The plain module of a transformed one, without its adapters."""
    copy: Any = nnx.clone(model)
    for _, _, (owner, _, param) in placed_kernels(copy):
        param.set_value(own_value(param.get_value()))
        if isinstance(vars(owner).get(A), nnx.LoRAParam):
            delattr(owner, A)
            delattr(owner, B)
    thaw(copy)
    restore(copy)
    return copy


def _added(plain: nnx.Module, argument: str, adapters: _Adapters, times: float) -> nnx.Module:
    """A copy of a plain module with `times` the adapters added to its kernels."""
    if not isinstance(plain, nnx.Module):
        raise TypeError(f"`{argument}`: expected an NNX module; got {type(plain).__name__}.")
    copy: Any = plain_module(plain)
    places = places_of(copy)
    for path, (shape, own) in adapters.items():
        got = places[path].param.shape if path in places else "none"
        if got != shape:
            raise ValueError(
                f"`{argument}`: expected the module that was adapted, which has layer "
                f"{'/'.join(path[:-1])!r} with a kernel of shape {shape}; got {got}."
            )
        param = places[path].param
        param.set_value(own.merged(param.get_value(), times))
    return copy


def _adapters(model: nnx.Module) -> _Adapters:
    """The model's adapters."""
    lora = lora_of(model)
    if lora is None:
        raise TypeError(
            f"`model`: expected an NNX module that fp8jax.transform(..., lora=...) made; got "
            f"{type(model).__name__}. Of a Linen model, call `model.merge(variables)`."
        )
    flat = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    adapters = unflatten_dict({tuple(map(str, path)): variable.get_value() for path, variable in flat})
    shapes = {path: param.shape for path, _, (_, _, param) in placed_kernels(model)}
    recipe = rewritten_of(model).function.recipe  # pyright: ignore
    found = lora.of_kernels(adapters, shapes, {}, recipe, is_complete=False)
    return {path: (shapes[path], own) for path, own in found.items()}


def lora_of(model: nnx.Module) -> LoRA | None:
    """The adapters that `transform` added; None without adapters."""
    rewritten = rewritten_of(model)
    return None if rewritten is None else rewritten.function.settings.lora
