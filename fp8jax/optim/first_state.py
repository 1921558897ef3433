"""The first moments, master weights and remainders of Adam, in a recipe's formats."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.optim.state import is_adam_state
from fp8jax.optim.step import Root
from fp8jax.optim.step.codecs import blockwise_zeros, zeros
from fp8jax.quantization import format_of, is_scaled, quantize, value
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, has_params


def first_state(params: Any, recipe: Recipe, in_8_bits: bool) -> list[Any]:
    """The trees of first moments, second moments, master weights and remainders, see `AdamState`.

    Args:
        params: the parameters, arrays and `ScaledArray`s.
        recipe: the formats.
        in_8_bits: whether moments are in 8-bit blocks instead.
    """

    def zero(number: int, param: Any) -> Any:
        if in_8_bits:
            return blockwise_zeros(param, signed=number == 0)
        moment = zeros(param, formats.get(recipe.moments[number]))
        return Root(moment) if number == 1 and recipe.rounding[2] == "root" else moment

    each = (
        lambda param: zero(0, param),
        lambda param: zero(1, param),
        lambda param: _master_of(param, recipe),
        lambda param: _remainder_of(param, recipe),
    )
    return [jax.tree.map(first, params, is_leaf=is_scaled) for first in each]


def with_masters(state: Any, params: Any) -> Any:
    """The optimizer state with master weights from a high-precision checkpoint.

    `init` sets master weights to the values of the FP8 weights, which are already rounded.

    Args:
        state: an optimizer state that contains one `adam` or `adamw`.
        params: parameters of the same structure, plain arrays or `ScaledArray`s, or whole variables.
    """

    def rebuild(node: Any) -> Any:
        if not is_adam_state(node):
            return node
        tree = params[PARAMS] if has_params(params) else params
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_scaled)
        masters = treedef.flatten_up_to(node.master)
        new = [m if m is None else _like(m, value(leaf)) for m, leaf in zip(masters, leaves, strict=True)]
        return node._replace(master=treedef.unflatten(new))

    return jax.tree.map(rebuild, state, is_leaf=is_adam_state)


def _like(kept: Any, new: jax.Array) -> Any:
    """`new`, a float32 array, in the format of `kept`."""
    if not is_scaled(kept):
        return new.astype(jnp.float32)
    return quantize(new, format_of(kept), power_of_two=True, blocks=kept.scale.shape)


def _master_of(param: Any, recipe: Recipe) -> Any:
    """The master weight of a parameter in the recipe's weight format; None for other parameters."""
    if recipe.master_weight == "-" or not is_scaled(param) or format_of(param).name != recipe.weight:
        return None
    format = formats.get(recipe.master_weight)
    if format == formats.FP32:
        return value(param)
    return quantize(value(param), format, power_of_two=True, blocks=param.scale.shape)


def _remainder_of(param: Any, recipe: Recipe) -> Any:
    """Zeros for what rounding takes from a parameter or its master weight; None for other parameters."""
    if recipe.rounding[1] != "kahan" or not is_scaled(param):
        return None
    is_kept = format_of(param) == formats.FP16 or _master_of(param, recipe) is not None
    return jnp.zeros_like(param.data, formats.E4M3.dtype) if is_kept else None
