"""Storage formats of optimizer states, and their encoding and decoding.

| storage | bytes per entry | scale |
|---|---|---|
| float32 array | 4 | none |
| `ScaledArray` of E4M3 or FP16 | 1 or 2 | a power of two for each scale block of the parameter |
| `Blockwise` | 1.016 | the absmax of each 256 entries |
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.optim.step.blockwise import Blockwise, block_absmax
from fp8jax.quantization import ScaledArray, format_of, is_scaled, quantize, to_bits, value

# The smallest array with blockwise moments, as in bitsandbytes (`min_8bit_size`).
FEWEST = 4096


def zeros(param: Any, format: formats.Format) -> Any:
    """Zeros in a format, with the shape, scale blocks and sharding of a parameter."""
    data = jnp.zeros_like(param.data if is_scaled(param) else param, format.dtype)
    if format == formats.FP32:
        return data
    return ScaledArray(data, jnp.ones(param.scale.shape if is_scaled(param) else (), jnp.float32))


def blockwise_zeros(param: Any, *, signed: bool) -> Any:
    """`Blockwise` zeros; float32 zeros for an array with fewer than `FEWEST` entries."""
    like = param.data if is_scaled(param) else param
    return jnp.zeros_like(like, jnp.float32) if like.size < FEWEST else Blockwise.zeros(like, signed)


def decode(stored: Any) -> jax.Array:
    """The dequantized value, float32."""
    if isinstance(stored, Blockwise):
        return stored.dequantize()
    return value(stored).astype(jnp.float32)


def block_maxima(x: jax.Array, stored: Any) -> Any:
    """The absmax of each block of `x` if `stored` is a `Blockwise`, else None."""
    return block_absmax(x) if isinstance(stored, Blockwise) else None


def encode(x: jax.Array, stored: Any, scale: Any) -> Any:
    """`x` in the format of `stored`, rounded to nearest.

    Args:
        x: the new value, float32.
        stored: the old value, in its storage format.
        scale: the new scale of a `ScaledArray`, or the `block_maxima` of a `Blockwise`.
    """
    if isinstance(stored, Blockwise):
        return Blockwise.of(x, stored.signed, scale)
    return quantize(x, format_of(stored), scale) if is_scaled(stored) else x


def select(ok: jax.Array, new: Any, old: Any) -> Any:
    """`new` if `ok`, else `old`; both in the same storage format."""
    return jax.tree.map(lambda new, old: _select(ok, new, old), new, old)


def _select(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating) or new.dtype == jnp.float32:
        return jnp.where(ok, new, old)
    # As integers, because XLA on CPU converts float8 to float16 to select.
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)
