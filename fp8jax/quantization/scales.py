"""Scales from amaxes.

Scales are in [2**-126, 2**126], so that the scale and its reciprocal are normal float32 numbers. Compilers
may flush subnormal numbers to zero.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32

from fp8jax.quantization.rounding import select

MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126

# Marks a scale that is not set yet: larger than any scale. With a mark in the scale, a cast need not look at
# the amax history.
UNSET = 2 * MAX_SCALE

# First scales of an input, a kernel and an output gradient. Their normal numbers are inputs of 0.125 to 3584
# and kernels of 2**-10 to 28 in E4M3, and gradients of 2**-26 to 14 in E5M2. In the first step larger values
# saturate, and much smaller values round to zero.
TYPICAL = (2.0**3, 2.0**-4, 2.0**-12)

# By a recipe's `first_scale`.
FIRST_SCALES = {"typical": TYPICAL, "tensor": (UNSET,) * 3, "one": (1.0,) * 3}


def usable(amax: Float32[Array, "..."]) -> Bool[Array, "..."]:
    """Whether an amax is positive, finite and not subnormal; bool of its shape."""
    tiny = jnp.float32(np.finfo(np.float32).tiny)
    return (amax >= tiny) & (amax <= jnp.float32(np.finfo(np.float32).max))


def scale_of(
    amax: Float32[Array, "..."],
    limit: Any,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    otherwise: Any = 1.0,
) -> Float32[Array, "..."]:
    """The scale that maps `amax` to `limit`, the max of a format.

    Mathematically equivalent to `amax / limit * 2**margin`; as a power of two to
    `2**-(floor(log2(limit / amax)) - margin)`, exactly (no `log2` is taken).

    Args:
        amax: float32, any shape.
        limit: the format's max; a number or an array that broadcasts.
        margin: binary headroom left above amax.
        power_of_two: round the scale up to a power of two (MS-AMP's scales).
        otherwise: the scale where amax is 0, subnormal, infinite or NaN.

    Returns:
        float32 of amax's shape, within [2**-126, 2**126].

    References:
        TransformerEngine `DelayedScaling` and `Float8CurrentScaling` (the reciprocal of
        their factor), MS-AMP `ScalingMeta` (power of two).
    """
    amax = jnp.broadcast_to(amax, np.broadcast_shapes(amax.shape, np.shape(limit)))
    if not isinstance(otherwise, int | float):
        otherwise = jnp.broadcast_to(jnp.asarray(otherwise, jnp.float32), amax.shape)
    known = usable(amax)
    factor = factor_of(amax, limit, margin=margin, power_of_two=power_of_two)
    # Equals `where(known, 1 / factor, otherwise)`. XLA computes a division once, but a select again for each
    # of its uses.
    return select(known, jnp.ones_like(amax), otherwise) / select(known, factor, 1.0)


@functools.cache
def largest_scale(limit: float, *, power_of_two: bool = False) -> np.float32:
    """The largest scale for which `limit * scale` is finite."""
    largest = np.finfo(np.float32).max
    exact = float(largest) / limit
    if power_of_two:
        return np.float32(2.0 ** np.floor(np.log2(exact)))
    scale = np.float32(exact)
    return scale if float(scale) <= exact else np.nextafter(scale, np.float32(0))


def factor_of(amax: jax.Array, limit: Any, *, margin: int = 0, power_of_two: bool = False) -> jax.Array:
    """The reciprocal of `scale_of` where the amax is `usable`; elsewhere undefined."""
    if power_of_two:
        bits, of_limit = _bits(amax), _bits(limit)
        # Exponents and fractions are subtracted at once: a borrow from the exponents is the floor.
        exponent = lax.clamp(np.int32(-126), ((of_limit - bits) >> 23) - margin, np.int32(126))
        return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    factor = limit * np.float32(2.0**-margin) / amax
    return lax.clamp(np.float32(MIN_SCALE), factor, np.float32(MAX_SCALE))


def _bits(x: Any) -> Any:
    """The bits of float32 numbers, int32."""
    if isinstance(x, int | float):
        return np.float32(x).view(np.int32)
    return lax.bitcast_convert_type(jnp.float32(x), jnp.int32)
