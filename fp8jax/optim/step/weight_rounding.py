"""Rounding of new weights, so that small updates are not lost: stochastic rounding, or remainders ("kahan").

With "kahan" the rounding error of a weight is stored in one byte, its remainder. The next step adds the
remainder to the weight. With stochastic rounding there is no remainder.

| weight | remainder | unit |
|---|---|---|
| `ScaledArray` | E4M3 | `REMAINDER_STEP` times the weight's scale |
| bfloat16 or float16 array | int8 | a 256th of each weight's last bit |
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax import formats
from fp8jax.optim.step.codecs import decode, encode
from fp8jax.quantization import (
    cast_stochastically,
    expand,
    format_of,
    is_scaled,
    nearest,
    remainder_of,
)

# Half an ulp of the largest FP16 number, 16, is then 256 in E4M3, the largest power of two it has.
REMAINDER_STEP = 1 / 16


def decode_weight(weight: Any, remainder: Any) -> jax.Array:
    """The float32 value of a weight with its remainder; None without a remainder."""
    if remainder is None:
        return decode(weight)
    if not is_scaled(weight):
        stored = weight.astype(jnp.float32)
        return stored + remainder.astype(jnp.float32) * _fraction(stored, format_of(weight))
    codes = weight.data.astype(jnp.float32) + REMAINDER_STEP * remainder.astype(jnp.float32)
    return codes * expand(weight.scale, weight.shape)


def encode_weight(
    x: jax.Array,
    stored: Any,
    scale: Any,
    remainder: Any,
    *,
    rounding: str,
    random: Any = None,
    again: Any = None,
) -> tuple[Any, Any]:
    """A new weight in the format of `stored`, and its new remainder; None without a remainder.

    Args:
        x: the new weight, float32.
        stored: the old weight or master weight.
        scale: the new scale of a `ScaledArray`.
        remainder: the old remainder.
        rounding: the recipe's rounding of weights; "kahan" needs the remainder.
        random: bits for stochastic rounding, of the weight or of its remainder.
        again: the new weight, computed again for the remainder; by default `x`.
    """
    if remainder is None:
        return encode(x, stored, scale, random if rounding == "stochastic" else None), None
    return encode(x, stored, scale), encode_remainder(x if again is None else again, stored, scale, random)


def encode_remainder(x: jax.Array, stored: Any, scale: Any, random: jax.Array) -> jax.Array:
    """The error of `encode` to nearest, as E4M3 codes that are rounded stochastically."""
    remainder = remainder_of(x * expand(1 / scale, x.shape), format_of(stored))
    return cast_stochastically(remainder / REMAINDER_STEP, formats.E4M3, random)


def is_rounded(param: Any, rounding: str) -> bool:
    """Whether the step itself rounds a parameter that is no `ScaledArray`: a bfloat16 or float16 array that a
    recipe does not round to nearest. Other arrays get an update to add."""
    return rounding != "nearest" and has_16_bits(param)


def has_16_bits(param: Any) -> bool:
    """Whether a parameter is a bfloat16 or float16 array."""
    if param is None or is_scaled(param):
        return False
    return param.dtype in (formats.BF16.dtype, formats.FP16.dtype)


def fits(x: jax.Array, param: Any) -> Any:
    """Where x, float32, stays finite in the dtype of a bfloat16 or float16 parameter; True for others."""
    if not has_16_bits(param):
        return True
    # A little below the midpoint to infinity (2 float32 numbers for float16, 128 for bfloat16): the sum that
    # writes the weight may be contracted otherwise.
    format = format_of(param)
    return jnp.abs(x) < np.float32(format.max * (1 + 2.0 ** (-format.mantissa_bits - 2)))


def encode_plain(x: jax.Array, stored: Any, *, rounding: str, random: jax.Array) -> tuple[jax.Array, Any]:
    """The float32 update of a bfloat16 or float16 weight, and its new remainder; None without a remainder.

    `stored + update`, in float32 and then rounded to the weight's dtype, is exactly the new weight: the
    number next to x, or, if x is less than 2**-12 of the old weight, the next one that such a sum can give.

    Args:
        x: the new weight, float32.
        stored: the old weight.
        rounding: the recipe's rounding of weights, "kahan" or "stochastic".
        random: bits for stochastic rounding, of the weight or of its remainder.
    """
    format, old = format_of(stored), stored.astype(jnp.float32)
    if rounding == "stochastic":
        rounded = cast_stochastically(x, format, random).astype(jnp.float32)
    else:
        rounded = nearest(x, format)
    rounded = nearest(old + (rounded - old), format)
    if rounding == "stochastic":
        return rounded - old, None
    codes = jnp.floor((x - rounded) / _fraction(rounded, format) + (random >> np.uint32(8)) * 2.0**-24)
    return rounded - old, jnp.clip(codes, -128, 127).astype(jnp.int8)


def _fraction(weight: jax.Array, format: formats.Format) -> jax.Array:
    """A 256th of the last bit of each weight, a power of two. XLA takes subnormal numbers of float32 for 0,
    so it is not less than 2**-115 for the smallest bfloat16 weights."""
    binade = lax.max(lax.abs(weight), jnp.float32(max(format.smallest_normal, 2.0**-100)))
    bits = lax.bitcast_convert_type(binade, jnp.uint32) & np.uint32(0x7F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) * 2.0 ** (-format.mantissa_bits - 8)
