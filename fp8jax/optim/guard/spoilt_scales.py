"""Spoilt scales: NaNs that hold the exponents of the scales, which are powers of two.

    sign, mantissa = the 8 bits of (exponent + 1)          # both for float32 and for bfloat16 scales

Compiled code cannot raise. It spoils the scales of weights that it must not change, so that the next loss is
NaN and no weight is lost.
"""

import jax
import jax.numpy as jnp
from jax import lax


def spoilt(bits: jax.Array) -> jax.Array:
    """The bits of scales, uint32 or uint16, as NaNs that hold their exponents."""
    shift = 8 * bits.dtype.itemsize - 16
    top = (bits >> shift).astype(jnp.uint32)
    held = (top >> 7) + 1
    nan = (((held & 1) << 15) | 0x7F80 | (held >> 1)).astype(bits.dtype) << shift
    return jnp.where(is_spoilt(bits), bits, nan)


def is_spoilt(bits: jax.Array) -> jax.Array:
    """Whether these are bits of NaN."""
    top = bits >> (8 * bits.dtype.itemsize - 16)
    return ((top & 0x7F80) == 0x7F80) & ((top & 0x7F) != 0)


def restored(bits: jax.Array) -> jax.Array:
    """The inverse of `spoilt`; finite scales stay."""
    shift = 8 * bits.dtype.itemsize - 16
    top = (bits >> shift).astype(jnp.uint32)
    exponent = (((top & 0x7F) << 1) | (top >> 15)) - 1
    return jnp.where(is_spoilt(bits), (exponent << 7).astype(bits.dtype) << shift, bits)


def spoilt_scale(scale: jax.Array) -> jax.Array:
    """A float32 scale, `spoilt`."""
    return lax.bitcast_convert_type(spoilt(lax.bitcast_convert_type(scale, jnp.uint32)), jnp.float32)
