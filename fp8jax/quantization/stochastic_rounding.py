"""Casts for optimizer states: stochastic rounding, rounding to nearest in float32, and its remainder."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Shaped, UInt32

from fp8jax.formats import Format
from fp8jax.quantization.casts import bits_of, nan_code, select


def cast_stochastically(
    x: Float32[Array, "..."], format: Format, random: UInt32[Array, "..."]
) -> Shaped[Array, "..."]:
    """Casts `x` to `format` by stochastic rounding: unbiased, saturating, NaN stays NaN; x's shape.

    A number between two codes becomes the upper one with the probability of its distance to the lower one.

    Args:
        x: any shape.
        format: a format of at most 16 bits.
        random: uniform random bits; the upper `23 - format.mantissa_bits` of each number are used.

    References:
        Deep Learning with Limited Numerical Precision, arXiv 1502.02551, section 3.
    """
    return lax.bitcast_convert_type(
        stochastic_codes(x, format, random).astype(bits_of(format.dtype)), format.dtype
    )


def stochastic_codes(
    x: Float32[Array, "..."], format: Format, random: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """`cast_stochastically`, as codes in uint32; to E4M4, too, for x that is not negative."""
    cut = np.uint32(23 - format.mantissa_bits)
    magnitude = lax.min(lax.abs(x), jnp.float32(format.max))
    # Takes a subnormal number of the format to the binade of the least normal number, which has its step.
    is_subnormal = magnitude < format.smallest_normal
    shifted = magnitude + select(is_subnormal, jnp.full_like(x, format.smallest_normal), 0.0)
    # A float's bits in order: adding random bits below the mantissa carries into it, and into the exponent.
    bits = (lax.bitcast_convert_type(shifted, jnp.uint32) + (random >> (32 - cut))) >> cut
    normal = np.uint32((127 - format.exponent_bias) << format.mantissa_bits)
    code = bits - normal - (is_subnormal.astype(jnp.uint32) << np.uint32(format.mantissa_bits))
    # A NaN gives a large number here.
    code = lax.min(code, jnp.full_like(code, nan_code(format)))
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31)) << np.uint32(format.bits - 1)
    return code | sign


def nearest(x: Float32[Array, "..."], format: Format) -> Float32[Array, "..."]:
    """The number of a 16-bit format that is nearest to x, ties to even, as float32; saturates; NaN stays.

    A compiler may omit a conversion to 16 bits and back, but not this.
    """
    magnitude = lax.min(lax.abs(x), jnp.float32(format.max))
    bits, cut = lax.bitcast_convert_type(magnitude, jnp.uint32), np.uint32(23 - format.mantissa_bits)
    last = (bits >> cut) & np.uint32(1)
    bits = ((bits + np.uint32((1 << (cut - 1)) - 1) + last) >> cut) << cut
    anchor = _anchor(magnitude, format)
    subnormal = (magnitude + anchor) - anchor
    is_subnormal = magnitude < format.smallest_normal
    rounded = lax.select(is_subnormal, subnormal, lax.bitcast_convert_type(bits, jnp.float32))
    return lax.select(x < 0, -rounded, rounded)


def remainder_of(x: Float32[Array, "..."], format: Format) -> Float32[Array, "..."]:
    """x minus `cast(x, format)`, float32 and exact; at most half a step of the format unless x saturates."""
    # The code itself is no help: a compiler may omit its conversion to float16 and back.
    rounded = rounded_magnitude(x, format)
    return x - lax.select(x < 0, -rounded, rounded)


def rounded_magnitude(x: Float32[Array, "..."], format: Format) -> Float32[Array, "..."]:
    """The magnitude of `cast(x, format)` as float32, without a cast; not of NaN."""
    magnitude = lax.min(lax.abs(x), jnp.float32(format.max))
    anchor = _anchor(magnitude, format)
    return (magnitude + anchor) - anchor


def _anchor(magnitude: jax.Array, format: Format) -> jax.Array:
    """A power of two with the format's step as its last bit: it rounds what is added to it. A compiler would
    omit the sum and the difference of a constant."""
    binade = lax.max(magnitude, jnp.float32(format.smallest_normal))
    bits = lax.bitcast_convert_type(binade, jnp.uint32) & np.uint32(0x7F800000)
    return lax.bitcast_convert_type(bits + np.uint32((23 - format.mantissa_bits) << 23), jnp.float32)
