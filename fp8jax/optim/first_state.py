"""The first moments, master weights and remainders of Adam, in a recipe's formats."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.optim.state import is_adam_state
from fp8jax.optim.step import Root
from fp8jax.optim.step.codecs import FEWEST, blockwise_zeros, zeros
from fp8jax.quantization import format_of, is_scaled, quantize, value
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, has_params

# Names of storages beside those of formats.
NONE, BLOCKWISE, ROOT = "none", "8-bit blocks", "root of "

TO_NEAREST = ("nearest", "nearest", "value")


class StoredFormats(NamedTuple):
    """The names of the formats in which the state of one parameter is stored."""

    mu: str
    nu: str
    master: str
    remainder: str


def first_state(params: Any, recipe: Recipe, in_8_bits: bool) -> list[Any]:
    """The trees of first moments, second moments, master weights and remainders, see `AdamState`.

    Args:
        params: the parameters, arrays and `ScaledArray`s.
        recipe: the formats.
        in_8_bits: whether moments are in 8-bit blocks instead.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    each = [_first_of(leaf, stored_formats(leaf, recipe, in_8_bits)) for leaf in leaves]
    return [treedef.unflatten(stored[i] for stored in each) for i in range(4)]


def stored_formats(param: Any, recipe: Recipe, in_8_bits: bool) -> StoredFormats:
    """The formats in which a recipe stores the state of one parameter, an array or a `ScaledArray`."""
    mu, nu = recipe.moments
    if in_8_bits:
        mu = nu = "FP32" if param.size < FEWEST else BLOCKWISE
    elif recipe.rounding[2] == "root":
        nu = ROOT + nu
    master = remainder = NONE
    if is_scaled(param):
        weight = format_of(param).name
        if recipe.master_weight != "-" and weight == recipe.weight:
            master = recipe.master_weight
        if recipe.rounding[1] == "kahan" and (weight == "FP16" or master != NONE):
            remainder = "E4M3"
    return StoredFormats(mu, nu, master, remainder)


def _first_of(param: Any, stored: StoredFormats) -> list[Any]:
    """The first moments, master weight and remainder of one parameter."""

    def zero(name: str, signed: bool) -> Any:
        if name == BLOCKWISE:
            return blockwise_zeros(param, signed=signed)
        moment = zeros(param, formats.get(name.removeprefix(ROOT)))
        return Root(moment) if name.startswith(ROOT) else moment

    moments = zero(stored.mu, True), zero(stored.nu, False)
    return [*moments, _master_of(param, stored.master), first_remainder(param, stored)]


def first_remainder(param: Any, stored: StoredFormats) -> Any:
    """Zeros for the remainders of one parameter; None for `NONE`."""
    return None if stored.remainder == NONE else jnp.zeros_like(param.data, formats.E4M3.dtype)


def first_key(recipe: Recipe, seed: Any) -> Any:
    """The key of an `AdamState`, shape=(2,), uint32; None for a recipe that rounds to nearest."""
    if recipe.rounding == TO_NEAREST:
        return None
    return jnp.stack([jnp.zeros([], jnp.uint32), jnp.asarray(seed).astype(jnp.uint32)])


def first_roundings(params: Any, recipe: Recipe | None, seed: Any) -> tuple[Any, Any, Any]:
    """The first remainders, key and step count of a `DequantizedState`; None where the recipe needs none.

    Args:
        params: the parameters, arrays and `ScaledArray`s.
        recipe: its `rounding` says how weights are rounded; None for that of `fp8`.
        seed: of the random bits.
    """
    row = recipe or Recipe.FP8
    scaled = list(filter(is_scaled, jax.tree.leaves(params, is_leaf=is_scaled)))
    if row.rounding[1] == "nearest" or not scaled:
        return None, None, None
    remainder = None
    if row.rounding[1] == "kahan":
        remainder = jax.tree.map(
            lambda param: first_remainder(param, stored_formats(param, row, False)), params, is_leaf=is_scaled
        )
    return remainder, first_key(row, seed), jnp.zeros([], jnp.int32)


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


def _master_of(param: Any, name: str) -> Any:
    """The master weight of a parameter in a format; None for `NONE`."""
    if name == NONE:
        return None
    if name == "FP32":
        return value(param)
    return quantize(value(param), formats.get(name), power_of_two=True, blocks=param.scale.shape)
