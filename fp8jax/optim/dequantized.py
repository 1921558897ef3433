"""Any optax optimizer for models with quantized weights and gradients.

    tx = fp8jax.optim.with_dequantized(optax.lion(1e-4))
    tx = fp8jax.optim.with_dequantized(optax.adafactor(1e-3), "fp8")

The optax optimizer gets dequantized float32 arrays. The new value of a quantized weight is rounded to the
weight's format, as the recipe's `rounding` says. The optimizer's state is not quantized.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.optim.checks import (
    check_params,
    check_seed,
    check_state,
    check_weights,
    recipe_of,
    refuse_8_bits,
)
from fp8jax.optim.guard.lost_tags import check_finite_scales, check_tags, spoilt_updates
from fp8jax.optim.guard.replace_update import ReplaceUpdate
from fp8jax.optim.state import DequantizedState
from fp8jax.optim.state.convert import check_roundings
from fp8jax.optim.state.stored_formats import first_roundings
from fp8jax.optim.step.codecs import select
from fp8jax.optim.step.weight_rounding import decode_weight, encode_plain, encode_weight, fits, is_rounded
from fp8jax.optim.transforms import takes_variables
from fp8jax.optim.wrappers import filled, in_variables
from fp8jax.platforms import any_of, with_auto_axes
from fp8jax.quantization import (
    amax,
    format_of,
    is_scaled,
    largest_scale,
    leaf_seeds,
    other_bits,
    random_bits,
    scale_of,
    with_float32_scales,
)
from fp8jax.recipe import Recipe


def with_dequantized(
    tx: optax.GradientTransformation, recipe: Recipe | str | None = None, *, seed: Any = 0
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on the dequantized float32 values of parameters and gradients.

    A step that would make a weight or a float of tx's state infinite or NaN is skipped, and
    `fp8jax.optim.skipped` counts it.

    Args:
        tx: an optimizer of plain arrays. In a chain, wrap everything after `clip_by_global_norm`.
        recipe: the model's recipe. Its `rounding` says how FP16 weights, and plain bfloat16 and float16
            weights, are rounded. None rounds them as `fp8` does: one more byte stores what rounding takes
            from a weight, and the next step adds it.
        seed: of the random bits, as in `adam`.

    Returns:
        An optimizer for parameters or whole variables; `update` needs them. The updates of plain parameters
        are arrays to add. The updates of `ScaledArray`s are their new values (`ReplaceUpdate`), in the same
        format on new power-of-two scales. So this optimizer is the last in a chain.

    Raises:
        ValueError: from `init`, the recipe's weights are not those of the parameters; or a weight has 8 bits,
            so that small steps would be lost: use `adam` or `adamw`, which have master weights. From
            `update`, the state is of another recipe; `fp8jax.optim.convert` changes it.
    """
    check_seed(seed)
    row = recipe_of(recipe)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> DequantizedState:
        check_weights(row, params)
        refuse_8_bits(params)
        inner = tx.init(_values(params, row))
        return DequantizedState(inner, jnp.zeros([], jnp.int32), *first_roundings(params, row, seed))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, DequantizedState]:
        check_params(params)
        broken, grads = check_tags(updates), _values(updates, row)
        check_state(state, DequantizedState)
        check_finite_scales(params)
        check_weights(row, params)
        leaves, treedef = jax.tree.flatten(with_float32_scales(params), is_leaf=is_scaled)
        remainders = [None] * len(leaves)
        if state.remainder is not None:
            remainders = treedef.flatten_up_to(filled(state.remainder, params))
        check_roundings(leaves, remainders, state.key, row)
        values = [_value_of(*pair, row) for pair in zip(leaves, remainders, strict=True)]
        new, inner = tx.update(grads, state.inner, treedef.unflatten(values), **extra)
        new = treedef.flatten_up_to(new)
        weights = [_in_float32(old) + update for old, update in zip(values, new, strict=True)]
        checked = [jnp.where(fits(x, leaf), x, jnp.inf) for x, leaf in zip(weights, leaves, strict=True)]
        ok = _are_finite(checked) & _stays_finite(state.inner, inner)
        seeds = [None] * len(leaves)
        if state.key is not None:
            seeds = list(leaf_seeds(state.key, state.count + 1, len(leaves)))
        each = zip(leaves, remainders, seeds, weights, new, strict=True)
        written = [_written(*leaf, ok, row) for leaf in each]
        updates, remainders = (treedef.unflatten(pair[i] for pair in written) for i in range(2))
        updates = spoilt_updates(updates, params, broken, grads)
        return updates, DequantizedState(
            jax.tree.map(lambda new, old: jnp.where(ok, new, old), inner, state.inner),
            state.skipped + jnp.where(ok, 0, 1),
            None if state.remainder is None else in_variables(state.remainder, remainders),
            state.key,
            None if state.count is None else jnp.where(ok, state.count + 1, state.count),
        )

    return takes_variables(optax.GradientTransformationExtraArgs(init, update))


def _values(tree: Any, row: Any) -> Any:
    return jax.tree.map(lambda leaf: _value_of(leaf, None, row), tree, is_leaf=is_scaled)


def _value_of(leaf: Any, remainder: Any, row: Any) -> Any:
    """The float32 value of a scaled or rounded parameter or gradient; another leaf as it is."""
    is_decoded = is_scaled(leaf) or is_rounded(leaf, (row or Recipe.FP8).rounding[1])
    return decode_weight(leaf, remainder) if is_decoded else leaf


def _in_float32(x: Any) -> Any:
    return x if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    """Whether all of these floats and complex numbers are finite."""
    parts = [y for x in arrays for y in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    return jnp.all(jnp.stack([jnp.zeros((), jnp.float32), *map(amax, parts)]) < jnp.inf)


def _stays_finite(old: Any, new: Any) -> jax.Array:
    """Whether no entry of a state became infinite or NaN; `reduce_on_plateau` begins with infinities."""
    pairs = zip(jax.tree.leaves(old), map(jnp.asarray, jax.tree.leaves(new)), strict=True)
    changes = [
        ~(jnp.isfinite(y) | jnp.isnan(x) | (jnp.isinf(x) & ~jnp.isnan(y)))
        for x, y in pairs
        if jnp.issubdtype(y.dtype, jnp.inexact)
    ]
    return ~any_of([jnp.zeros((), bool), *map(jnp.any, changes)])


def _written(
    leaf: Any, remainder: Any, seed: Any, weight: jax.Array, update: jax.Array, ok: jax.Array, row: Any
) -> tuple[Any, Any]:
    """The update of one parameter and its new remainder; no change unless `ok`."""
    rounding = (row or Recipe.FP8).rounding[1]
    is_plain, scale = not is_scaled(leaf), None
    if is_plain and not is_rounded(leaf, rounding):
        return jnp.where(ok, update, 0), None
    if not is_plain:
        limit = format_of(leaf).max
        scale = scale_of(amax(weight, leaf.scale.shape), limit, power_of_two=True)
        scale = jnp.minimum(scale, largest_scale(limit, power_of_two=True))
    rounded = functools.partial(_rounded, rounding=rounding)
    like = lambda leaf, remainder, seed, weight, scale: (weight if is_plain else leaf, remainder)  # noqa: E731
    new, new_remainder = with_auto_axes(rounded, like, leaf, remainder, seed, weight, scale)
    new = jnp.where(ok, new, 0) if is_plain else ReplaceUpdate.by(select(ok, new, leaf))
    return new, select(ok, new_remainder, remainder)


def _rounded(
    leaf: Any, remainder: Any, seed: Any, weight: jax.Array, scale: Any, rounding: str
) -> tuple[Any, Any]:
    bits: Any = None if seed is None else other_bits(random_bits(seed, weight.shape))[0]
    if scale is None:
        return encode_plain(weight, leaf, rounding=rounding, random=bits)
    return encode_weight(weight, leaf, scale, remainder, rounding=rounding, random=bits)
