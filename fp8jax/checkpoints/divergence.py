"""The divergence of a served model's probabilities from those of training.

    divergence(model, variables, tokens, mapping=LLAMA, format="fp8")      # nats per token

An engine multiplies the exported weights with inputs that it quantizes as it gets them. The recipe that
quantizes inputs in the same way computes the engine's probabilities here, from the weights of `weights`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from fp8jax.adapters.adapter import Adapter, adapter_of
from fp8jax.adapters.transform import transform
from fp8jax.checkpoints.export import source_of
from fp8jax.checkpoints.maps import by_name
from fp8jax.checkpoints.names import NameMap, Place
from fp8jax.checkpoints.serving import CODES, ServingFormat, dequantized, format_of
from fp8jax.checkpoints.tensors import ExportSource, tensors_of
from fp8jax.checkpoints.tree import Key, named
from fp8jax.formats import E8M0
from fp8jax.quantization import ScaledArray, is_scaled, own_value
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Rule
from fp8jax.scaling import of_recipe
from fp8jax.scaling.frozen_kernel import blocks_of_kernel
from fp8jax.variables import OURS, PARAMS, SCALING

# The recipes that quantize inputs as engines do for a format.
_RECIPES = {
    "fp8": "block,scaling=block_float32",
    "fp8:ue8m0": "block",
    "fp8:tensor": "current",
    "compressed-tensors:block": "block,scaling=block_float32",
    "compressed-tensors:mxfp8": "mxfp8",
}


def divergence(
    model: Any, *args: Any, mapping: NameMap | str, format: str = "fp8", **kwargs: Any
) -> Float32[Array, ""]:
    r"""The Kullback-Leibler divergence of an engine's probabilities from those of training.

        mean over positions of sum_c p(c) (log p(c) - log q(c))        p: of the engine, q: of training

    The engine's logits are those of the arrays that `save` writes, with inputs quantized by their own amaxes:
    in blocks of 1x128 on float32 scales (`fp8`, `compressed-tensors:block`) or on powers of two
    (`fp8:ue8m0`), in blocks of 1x32 on powers of two (`compressed-tensors:mxfp8`), or with one float32 scale
    (`fp8:tensor`). The logits of training are those of `model` with its own scales of inputs. It can be
    compiled.

    Both are computed with the GEMMs of this device. A kernel with a side that is no multiple of its block is
    quantized a second time, and so are experts; their codes may differ from the file's by a rounding.

    Args:
        model: a model from `fp8jax.transform`, without adapters, that returns logits, shape=(..., classes).
        args, kwargs: the model's variables and inputs; for an NNX module the inputs. Arrays, because they are
            computed with.
        mapping, format: see `save`.

    Returns:
        Nats per position, float32; 0 if the engine computes what training does, and NaN if logits are not
        finite. Rounding in float32 may leave up to about 1e-7.

    Raises:
        ValueError: see `save`; no recipe quantizes inputs as engines do for this format; the model returns
            something else than an array.
    """
    chosen, adapter = format_of(format), adapter_of(model)
    if format not in _RECIPES:
        raise ValueError(
            f"`format`: expected one of {', '.join(_RECIPES)}; got {format!r}, and no recipe quantizes "
            "inputs as engines do for it."
        )
    assert isinstance(chosen, ServingFormat)
    variables, inputs = adapter.split(*args)
    own = adapter.settings.recipe
    recipe = dataclasses.replace(Recipe.parse(_RECIPES[format]), include=own.include, exclude=own.exclude)
    rules = [
        Rule(
            f"re:{re.escape('/'.join(path))}",
            recipe if kernel.recipe.is_quantized else f"gemm={kernel.recipe.gemm}",
        )
        for path, kernel in adapter.kernels(variables, *inputs, **kwargs).items()
    ]
    engine = adapter_of(transform(adapter.plain(), recipe, rules=rules))
    served = _served(source_of(model, args, kwargs), by_name(mapping), chosen, recipe)
    p, q = (_log_probabilities(*call, inputs, kwargs) for call in ((engine, served), (adapter, variables)))
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))


def _log_probabilities(
    model: Adapter, variables: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Float32[Array, "..."]:
    logits = model.apply(variables, *inputs, **kwargs)
    if not isinstance(logits, jax.Array):
        raise ValueError(f"`model`: expected one that returns logits; got {type(logits).__name__}.")
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def _served(source: ExportSource, mapping: NameMap, format: ServingFormat, recipe: Recipe) -> dict[str, Any]:
    """The variables of the engine's model: codes and scales as they are exported, and plain arrays."""
    plain = jax.tree.map(own_value, source.variables[PARAMS], is_leaf=is_scaled)
    tree, kernels = named({PARAMS: plain}), dict[Key, list[Any]]()
    for name, parts, row in tensors_of(source, mapping, format):
        if row is not None and row.is_quantized:
            place = mapping.place(name)
            assert place is not None
            kernels.setdefault((PARAMS, *place.path), []).append(_operand(parts, place, format, recipe))

    def whole(layers: list[Any], shape: tuple[int, ...]) -> Any:
        stack = shape[: len(shape) - layers[0].ndim]
        return jax.tree.map(lambda *x: jnp.stack(x).reshape(*stack, *x[0].shape), *layers)

    new = {key: whole(layers, tree.leaves[key].shape) for key, layers in kernels.items()}
    others = {name: x for name, x in source.variables.items() if name not in OURS}
    return {**others, SCALING: {}, **tree.rebuilt(new)}


def _operand(parts: Mapping[str, Array], place: Place, format: ServingFormat, recipe: Recipe) -> Any:
    """A kernel of one layer in Flax's order, as an operand that is not quantized again; or its value."""
    codes, scale = parts[CODES], parts[format.scale]
    data, is_transposed = place.arrange(codes), place.axes == (1, 0)
    scale = lax.bitcast_convert_type(scale, E8M0.dtype) if scale.dtype == jnp.uint8 else scale
    scale = scale.astype(jnp.float32)
    if scale.size == 1 and not format.scale_rank:
        return ScaledArray(data, scale.reshape((1,) * data.ndim))
    method = of_recipe(recipe).kernel_method
    assert method is not None
    counts = blocks_of_kernel(method, data.shape, codes.shape[is_transposed])
    if counts is None:
        return place.arrange(dequantized(codes, scale, format.method.block))
    return ScaledArray(data, (scale.T if is_transposed else scale).reshape(counts))
