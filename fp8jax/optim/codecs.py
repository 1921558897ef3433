"""Formats in which an optimizer stores a tensor.

| stored as | bytes a number | scale |
|---|---|---|
| float32 array | 4 | none |
| `ScaledArray` of E4M3 or FP16 | 1 or 2 | a power of two for each block of the parameter's scale |
| `Blockwise` | 1.016 | the largest magnitude of 256 numbers |

Each codec has `zeros`, `decode`, `maxima` (what scales are made of) and `encode`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.optim.blockwise import Blockwise, block_absmax
from fp8jax.scaled import ScaledArray, format_of, is_scaled, quantize, to_bits, value

# Blockwise moments are for arrays of at least so many numbers, as in bitsandbytes (`min_8bit_size`).
FEWEST = 4096


def zeros(param: Any, format: formats.Format) -> Any:
    """Zero in a format, of the shape, scale blocks and sharding of a parameter."""
    data = jnp.zeros_like(param.data if is_scaled(param) else param, format.dtype)
    if format == formats.FP32:
        return data
    return ScaledArray(data, jnp.ones(param.scale.shape if is_scaled(param) else (), jnp.float32))


def blockwise_zeros(param: Any, *, signed: bool) -> Any:
    """Zero in 8-bit blocks; float32 for an array of fewer than `FEWEST` numbers."""
    like = param.data if is_scaled(param) else param
    return jnp.zeros_like(like, jnp.float32) if like.size < FEWEST else Blockwise.zeros(like, signed)


def decode(stored: Any) -> jax.Array:
    """The value, float32."""
    if isinstance(stored, Blockwise):
        return stored.dequantize()
    return value(stored).astype(jnp.float32)


def block_maxima(x: jax.Array, stored: Any) -> Any:
    """The maxima that the blocks of `x` are stored with; None where `stored` is no `Blockwise`."""
    return block_absmax(x) if isinstance(stored, Blockwise) else None


def encode(x: jax.Array, stored: Any, scale: Any) -> Any:
    """`x`, float32, in the format of `stored`, rounded to nearest.

    Args:
        x: the new value.
        stored: the old one.
        scale: of a `ScaledArray` its new scale, of a `Blockwise` the maxima of its new blocks.
    """
    if isinstance(stored, Blockwise):
        return Blockwise.of(x, stored.signed, scale)
    return quantize(x, format_of(stored), scale) if is_scaled(stored) else x


def select(ok: jax.Array, new: Any, old: Any) -> Any:
    """`new` if `ok`, else `old`, both stored alike."""
    return jax.tree.map(lambda new, old: _select(ok, new, old), new, old)


def _select(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating) or new.dtype == jnp.float32:
        return jnp.where(ok, new, old)
    # As integers: XLA on a CPU selects among float8 numbers by way of float16.
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)
