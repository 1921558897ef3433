"""Casts to codes, and codes as integers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8

from fp8jax.formats import E2M1, E4M4, Format
from fp8jax.platforms import by_platform, with_auto_axes


def cast(x: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """Casts float32 `x` to `format`: to nearest even, saturating, NaN stays NaN; x's shape."""
    if format.bits == 8:
        # XLA's float8 conversion on CPU is scalar. Integer arithmetic on the float's bits vectorizes: the
        # same codes three times as fast.
        by_format = functools.partial(by_platform, cpu=cast_by_bits, default=_cast_natively, format=format)
        return with_auto_axes(by_format, lambda x: x, x)
    return _cast_natively(x, format)


def _cast_natively(x: jax.Array, format: Format) -> jax.Array:
    limit = jnp.float32(format.max)
    return lax.clamp(-limit, x, limit).astype(format.dtype)


def cast_by_bits(x: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """`cast` to an 8-bit format by integer arithmetic on the float's bits."""
    return lax.bitcast_convert_type(codes_by_bits(x, format).astype(jnp.uint8), format.dtype)


def codes_by_bits(x: Float[Array, "..."], format: Format) -> UInt[Array, "..."]:
    """`cast` to a format of at most 8 bits, as codes in uint32."""
    # Adding a power of two, the anchor, rounds the magnitude to a multiple of the format's step and leaves
    # the rounded mantissa in the low bits of the sum. The anchor follows the exponent of x. Subnormals have
    # one step, so they have one anchor.
    cut = 23 - format.mantissa_bits
    smallest = np.uint32((128 - format.exponent_bias) << 23)
    magnitude = lax.bitcast_convert_type(lax.min(lax.abs(x), jnp.float32(format.max)), jnp.uint32)
    anchor = (lax.max(magnitude, smallest) & np.uint32(0x7F800000)) + np.uint32(cut << 23)
    rounded = lax.bitcast_convert_type(magnitude, jnp.float32) + lax.bitcast_convert_type(anchor, jnp.float32)
    mantissa = lax.bitcast_convert_type(rounded, jnp.uint32) - anchor
    code = mantissa + (anchor >> np.uint32(cut)) - np.uint32((smallest + (cut << 23)) >> cut)
    # A NaN gives a large number here.
    sign_bit = format.bits - 1
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31 - sign_bit)) & np.uint32(1 << sign_bit)
    return lax.min(code, np.uint32(nan_code(format))) | sign


def nan_code(format: Format) -> int:
    """The code of NaN without its sign; the largest code of E2M1 and E4M4, which have no NaN."""
    if format in (E2M1, E4M4):
        return 7 if format == E2M1 else 255
    return int(abs(np.array(np.nan, format.dtype)).view(bits_of(format.dtype)))


def to_bytes(codes: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The bits of 8-bit codes, uint8. XLA on CPU slices and stacks float8 arrays by way of float16."""
    return lax.bitcast_convert_type(codes, jnp.uint8)


def from_bytes(codes: UInt8[Array, "..."], format: Format) -> Float[Array, "..."]:
    """The inverse of `to_bytes`, for codes of a format of 8 bits."""
    return lax.bitcast_convert_type(codes, format.dtype)


def to_bits(codes: Float[Array, "..."]) -> UInt[Array, "..."]:
    """The bits of an array as unsigned integers of the same width."""
    return lax.bitcast_convert_type(codes, bits_of(codes.dtype))


def bits_of(dtype: Any) -> Any:
    """The unsigned integer dtype of the same width."""
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(jnp.dtype(dtype).itemsize, jnp.uint32))


def select(mask: jax.Array, x: Any, otherwise: Any) -> jax.Array:
    """`jnp.where` of arrays of one shape and dtype, one of which may be a number.

    It makes a third of `jnp.where`'s operations, and each dot has several.
    """
    like = otherwise if isinstance(x, int | float) else x
    cases = (lax.full_like(like, case) if isinstance(case, int | float) else case for case in (x, otherwise))
    return lax.select(mask, *cases)
