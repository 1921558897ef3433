"""FP8-LM's automatic scaling: the factor mu, which multiplies gradients before they are rounded to FP8.

    state = auto_scaling.init(grads)                          # once: 1 for each tensor
    grads, state = all_reduce(grads, "data", "O2", mu=state)  # each step

A scale that maps a tensor's amax to the format's max loses entries of 2**-15 of the amax or less. If a few
outliers are much larger than all other entries, it is better to saturate them. While at most `THRESHOLD` of a
tensor's entries saturate, over all devices, mu grows by a factor of two in `STEPS` steps; otherwise it is
halved.

References:
    FP8-LM, arXiv 2310.18313, section 2.1, equations 3 and 4. MS-AMP never had it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from fp8jax import formats
from fp8jax.quantization import MAX_SCALE, ScaledArray, expand, is_scaled, value

THRESHOLD = 1e-5
STEPS = 1000


def init(grads: PyTree) -> PyTree:
    """A tree with a float32 1 for each tensor of `grads` (arrays, `ScaledArray`s or their shapes)."""
    return jax.tree.map(lambda leaf: jnp.ones((), jnp.float32), grads, is_leaf=is_scaled)


def next_factors(
    factors: list[Float[Array, ""]], leaves: list[Any], codes: list[ScaledArray], axis_name: str
) -> list[Float[Array, ""]]:
    """The factors for the next step.

    Args:
        factors: the factors of this step, float32.
        leaves: the tensors before rounding.
        codes: the tensors after rounding.
        axis_name: the mesh axis to average over; one collective for all tensors.

    Returns:
        float32 scalars, equal on all devices. NaN does not count as saturated.
    """
    saturated = [_saturated(leaf, q) for leaf, q in zip(leaves, codes, strict=True)]
    shares = lax.pmean(jnp.stack(saturated), axis_name)
    growth = jnp.float32(2 ** (1 / STEPS))
    new = jnp.where(shares > THRESHOLD, jnp.stack(factors) / 2, jnp.stack(factors) * growth)
    return list(jnp.clip(new, 1.0, jnp.float32(MAX_SCALE**0.5)))


def _saturated(leaf: Any, q: ScaledArray) -> jax.Array:
    """The share of entries beyond the format's max."""
    limit = formats.E4M3.max * expand(q.scale, q.shape)
    return jnp.mean((jnp.abs(value(leaf).astype(jnp.float32)) > limit).astype(jnp.float32))
