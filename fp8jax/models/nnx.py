"""Flax NNX: a copy of a module whose layers multiply under a recipe.

    model = transform(module, recipe)               # a new module; the user's is untouched
    loss, grads = value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)                  # an `nnx.Optimizer`

Matched layers get another class, a subclass of their own that multiplies with `FP8Dot`; their
attributes and parameters keep their names. Beside its kernel such a layer has the scaling state
of its dot, `FP8State`s. They are no `nnx.Param`s, so optimizers and plain gradients pass them by;
`value_and_grad` gives them their new values in place, as NNX does with a BatchNorm's statistics.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8jax import backends, formats, loss_scale
from fp8jax.contraction import is_dot
from fp8jax.dot import init_state, quantized_kernel
from fp8jax.models import attention_layers, blocks, blocks_nnx
from fp8jax.models.moe import exchange
from fp8jax.models.moe.nnx import ExpertDense, ExpertRouter
from fp8jax.models.multiply import GEMM_DTYPES
from fp8jax.models.nnx_layers import STATE, How, attending, multiplying, rank_of, scoped, state_of
from fp8jax.models.subclass import change_class
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import OWN_DOT, Report, Row, Rows, measured, trace
from fp8jax.rewrite.rules import Choice, Layer, Rule, Rules
from fp8jax.scaled import quantize, value


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
    for path, layer in layers_of(copy, nnx.Module):
        if hasattr(layer, "how__fp8"):
            raise ValueError(
                f"`model`: expected a plain module; got one whose layer {path!r} is transformed already. "
                "Transform the original module, or `fp8jax.dequantize(model)`."
            )
    for path, layer in layers_of(copy, MATCHED):
        paths.append(path)
        _convert(layer, path, chosen, backend)
    for path, layer in layers_of(copy, nnx.Embed):
        choice = chosen.choose_attend(Layer(f"{path}.attend", layer, layer.embedding.shape[::-1]))
        if choice is not None:
            paths.append(f"{path}.attend")
            layer.how__fp8 = How(choice.recipe, backend, f"{path}.attend", None)
            _add_state(layer, "embedding", choice.recipe, ())
            change_class(layer, attending)
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
    layer.how__fp8 = How(recipe, backend, path, reason)
    if reason is None or (recipe.gemm in GEMM_DTYPES and not _has_own_dot(layer)):
        change_class(layer, multiplying)


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


def _named(model: nnx.Module) -> tuple[nnx.Module, Rows, list[How]]:
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
        change_class(layer, scoped)
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
        change_class(layer, lambda cls: vars(cls).get("plain__fp8", cls))
    if hasattr(copy, "loss_scale__fp8"):
        del copy.loss_scale__fp8
    return copy


def freeze(model: nnx.Module) -> nnx.Module:
    """See `fp8jax.freeze`."""
    copy: Any = nnx.clone(model)
    for _, layer in layers_of(copy, MATCHED):
        how = getattr(layer, "how__fp8", None)
        if how is not None and how.reason is None:
            kernel, state = layer.kernel.get_value(), state_of(layer)
            layer.kernel.set_value(quantized_kernel(kernel, how.recipe, state, rank_of(layer)))
    return copy


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
