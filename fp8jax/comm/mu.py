"""The automatic scale: how much larger than its share of the format gradients are sent.

    state = mu.init(grads)                                       # once: 1 for each tensor
    grads, state = all_reduce(grads, "data", mu=state)           # each step

A scale that maps a tensor's largest number to the format's max loses what is 2**-15 of it or less.
Where a few outliers are much larger than the rest, the rest is better served by cutting them off:
gradients are multiplied by mu before they are rounded. While at most `THRESHOLD` of a tensor's
numbers are cut off, on all devices, mu grows, by a factor of two in `STEPS` steps; else it is halved.

References:
    FP8-LM, arXiv 2310.18313, section 2.1, equations 3 and 4. MS-AMP never had it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.scaled import MAX_SCALE, ScaledArray, expand, is_scaled, value

THRESHOLD = 1e-5
STEPS = 1000


def init(grads: Any) -> Any:
    """A tree of float32 ones, one for each tensor of `grads` (arrays, `ScaledArray`s or their shapes)."""
    return jax.tree.map(lambda leaf: jnp.ones((), jnp.float32), grads, is_leaf=is_scaled)


def renewed(
    factors: list[jax.Array], leaves: list[Any], codes: list[ScaledArray], axis_name: str
) -> list[jax.Array]:
    """The factors of the next step.

    Args:
        factors: those of this one, float32 scalars.
        leaves: what was rounded.
        codes: to what.
        axis_name: the mesh axis over which all count; one collective for all tensors.

    Returns:
        float32 scalars, equal on all devices. A tensor with a NaN counts only its other numbers.
    """
    counts = [_cut_off(leaf, q) for leaf, q in zip(leaves, codes, strict=True)]
    shares = lax.pmean(jnp.stack(counts), axis_name)
    growth = jnp.float32(2 ** (1 / STEPS))
    new = jnp.where(shares > THRESHOLD, jnp.stack(factors) / 2, jnp.stack(factors) * growth)
    return list(jnp.clip(new, 1.0, jnp.float32(MAX_SCALE**0.5)))


def _cut_off(leaf: Any, q: ScaledArray) -> jax.Array:
    """The share of numbers beyond the format's max."""
    limit = formats.E4M3.max * expand(q.scale, q.shape)
    return jnp.mean((jnp.abs(value(leaf).astype(jnp.float32)) > limit).astype(jnp.float32))
