"""An NNX module whose parameters are frozen and whose adapters are trained.

    model = fp8jax.transform(pretrained, "O2", lora=fp8jax.LoRA(rank=8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

In the copy that `transform` makes the module's own parameters are `Frozen` variables, which are no
`nnx.Param`s; the adapters, `layer.lora_a` and `layer.lora_b`, are `nnx.LoRAParam`s, which are. So optimizers,
gradients and `nnx.Param` filters see the adapters alone. Where layers are scanned by `nnx.StateAxes`,
`Frozen` needs the axis that `nnx.Param` has.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8jax.contraction import einsum, is_dot
from fp8jax.layout import Layout
from fp8jax.models import blocks
from fp8jax.models.lora import A, B, LoRA, frozen_rules, is_able
from fp8jax.models.moe.nnx import ExpertDense
from fp8jax.models.multiply import GEMM_DTYPES
from fp8jax.models.nnx import MATCHED, Frozen, dequantize, layers_of, transform_as_chosen
from fp8jax.models.nnx_layers import rank_of
from fp8jax.recipe import Recipe
from fp8jax.rewrite.rules import Rule

# The class that a frozen parameter had, where it was not `nnx.Param` itself.
_CLASS = "class__fp8"


def transform(
    model: nnx.Module,
    recipe: Recipe,
    rules: tuple[Rule, ...],
    backend: str,
    lora: LoRA,
    checkpointing: blocks.Checkpointing | None = None,
    attention: str | None = None,
) -> nnx.Module:
    """See `fp8jax.transform`."""
    copy: Any = transform_as_chosen(model, frozen_rules(recipe, rules), backend, checkpointing, attention)
    for variable in _variables(copy, nnx.Param):
        if type(variable) is not nnx.Param:
            variable.set_metadata(_CLASS, type(variable))
        _change_class(variable, Frozen)
    able, unable, key = [], [], jax.random.key(lora.seed)
    for path, layer in layers_of(copy, MATCHED):
        how, layout = layer.how__fp8, _layout(layer)
        has_product = how.reason is None or (how.recipe.gemm in GEMM_DTYPES and hasattr(layer, "plain__fp8"))
        if not has_product or layout is None or not is_able(layout):
            unable.append(path)
        else:
            able.append(path)
        if has_product:
            narrow = lora.narrow(layer.kernel.get_value(), how.recipe, rank_of(layer))
            layer.kernel.set_value(narrow)
        if path in able[-1:] and layout is not None and lora.chooses(path, recipe):
            for name, new in lora.new(key, path, layer.kernel, layout).items():
                setattr(layer, name, nnx.LoRAParam(new))
            layer.how__fp8 = dataclasses.replace(how, lora_scale=lora.scale)
    lora.check(able, unable)
    copy.lora__fp8 = lora
    return copy


def is_adapted(model: nnx.Module) -> bool:
    """Whether `transform` gave a module adapters."""
    return "lora__fp8" in vars(model)


def merge(model: Any, base: Any = None) -> nnx.Module:
    """See `fp8jax.merge`."""
    lora, adapters = _adapters(model)
    if base is not None:
        return _with_adapters(_checked("base", base, model), lora, adapters, 1.0)
    copy: Any = nnx.clone(model)
    for _, layer in layers_of(copy, MATCHED):
        for name in (A, B):
            if name in vars(layer):
                delattr(layer, name)
    del copy.lora__fp8
    for variable in _variables(copy, Frozen):
        cls = variable.get_metadata().get(_CLASS, nnx.Param)
        if cls is not nnx.Param:
            variable.del_metadata(_CLASS)
        _change_class(variable, cls)
    return _with_adapters(dequantize(copy), lora, adapters, 1.0)


def unmerge(merged: nnx.Module, model: nnx.Module) -> nnx.Module:
    """See `fp8jax.unmerge`."""
    adapters = _adapters(model)
    return _with_adapters(_checked("merged", merged, model), *adapters, -1.0)


def _checked(argument: str, plain: Any, model: nnx.Module) -> nnx.Module:
    """The plain module, if it has the layers that have adapters in `model`."""
    if not isinstance(plain, nnx.Module):
        raise TypeError(f"`{argument}`: expected an NNX module; got {type(plain).__name__}.")
    shapes = {path: layer.kernel.shape for path, layer in layers_of(plain, MATCHED)}
    for path, layer in layers_of(model, MATCHED):
        if layer.how__fp8.lora_scale is not None and shapes.get(path) != layer.kernel.shape:
            raise ValueError(
                f"`{argument}`: expected the module that was adapted, which has layer {path!r} with a kernel "
                f"of shape {layer.kernel.shape}; got {shapes.get(path, 'none')}."
            )
    return plain


def _adapters(model: nnx.Module) -> tuple[LoRA, dict[str, dict[str, jax.Array]]]:
    """How, and the adapters by path."""
    if not isinstance(model, nnx.Module) or not is_adapted(model):
        raise TypeError(
            f"`model`: expected an NNX module that fp8jax.transform(..., lora=...) made; got "
            f"{type(model).__name__}. Of a Linen model, call `model.merge(variables)`."
        )
    found = {}
    for path, layer in layers_of(model, MATCHED):
        if layer.how__fp8.lora_scale is not None:
            found[path] = {name: getattr(layer, name).get_value() for name in (A, B)}
    return vars(model)["lora__fp8"], found


def _with_adapters(plain: nnx.Module, lora: LoRA, adapters: Any, times: float) -> nnx.Module:
    """A copy of a plain module with adapters added to its kernels."""
    copy: Any = nnx.clone(plain)
    for path, layer in layers_of(copy, MATCHED):
        if path in adapters:
            kernel = lora.added(layer.kernel.get_value(), adapters[path], times)
            layer.kernel.set_value(kernel)
    return copy


def _variables(model: nnx.Module, kind: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, kind)]


def _change_class(variable: Any, cls: type) -> None:
    object.__setattr__(variable, "__class__", cls)


def _layout(layer: Any) -> Layout | None:
    """How the layer's kernel takes part in its product; None if that is no single dot, or not known before
    the call."""
    rank = rank_of(layer)
    shape = tuple(layer.kernel.shape[layer.kernel.ndim - rank :])
    if isinstance(layer, nnx.Linear):
        return Layout.of((1, shape[0]), shape, (((1,), (0,)), ((), ())))
    if isinstance(layer, nnx.LinearGeneral):
        batch = len(layer.batch_axis)
        axes = tuple(range(batch, batch + len(layer.in_features)))
        batches = tuple(range(batch))
        return Layout.of(shape[: batch + len(axes)], shape, ((axes, axes), (batches, batches)))
    if isinstance(layer, ExpertDense):
        return None
    if not layer.einsum_str or not is_dot(layer.einsum_str.replace(" ", "")):
        return None
    found: list[Layout] = []
    subscripts = layer.einsum_str.replace(" ", "")
    left, right = subscripts.partition("->")[0].split(",")
    dims = dict(zip(right, shape, strict=True))
    inputs = jax.ShapeDtypeStruct(tuple(dims.get(c, 1) for c in left.replace("...", "")), jnp.float32)

    def dot_general(lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
        found.append(Layout.of(lhs.shape, rhs.shape, dimension_numbers))
        return lax.dot_general(lhs, rhs, dimension_numbers)

    kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
    jax.eval_shape(lambda x, k: einsum(subscripts, x, k, dot_general), inputs, kernel)
    return found[0]
