"""Casts to codes, and codes as integers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.formats import Format
from fp8jax.platforms import by_platform, with_auto_axes


def cast(x: jax.Array, format: Format) -> jax.Array:
    """float32 `x` to the codes of `format`: to nearest even, saturating, NaN kept."""
    if format.bits == 8:
        # XLA's own float8 conversion on CPU is scalar; integer arithmetic on the float's
        # bits vectorizes and gives the same codes three times as fast.
        by_format = functools.partial(by_platform, cpu=_cast_by_bits, default=_cast_natively, format=format)
        return with_auto_axes(by_format, lambda x: x, x)
    return _cast_natively(x, format)


def _cast_natively(x: jax.Array, format: Format) -> jax.Array:
    limit = jnp.float32(format.max)
    return lax.clamp(-limit, x, limit).astype(format.dtype)


def _cast_by_bits(x: jax.Array, format: Format) -> jax.Array:
    # Adding a power of two to the magnitude makes the float adder itself round to the format's step there,
    # and leaves the rounded mantissa in the low bits of the sum. The power follows the exponent, down to
    # that of the format's subnormals, which all have the same step.
    cut = 23 - format.mantissa_bits
    smallest = np.uint32((128 - format.exponent_bias) << 23)
    magnitude = lax.bitcast_convert_type(lax.min(lax.abs(x), jnp.float32(format.max)), jnp.uint32)
    anchor = (lax.max(magnitude, smallest) & np.uint32(0x7F800000)) + np.uint32(cut << 23)
    rounded = lax.bitcast_convert_type(magnitude, jnp.float32) + lax.bitcast_convert_type(anchor, jnp.float32)
    mantissa = lax.bitcast_convert_type(rounded, jnp.uint32) - anchor
    code = mantissa + (anchor >> np.uint32(cut)) - np.uint32((smallest + (cut << 23)) >> cut)
    # Of a NaN all this is a large number, and no other code is larger than NaN's.
    nan = np.uint32(np.array(np.nan, format.dtype).view(np.uint8) & 0x7F)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(24)) & np.uint32(0x80)
    code = lax.min(code, nan) | sign
    return lax.bitcast_convert_type(code.astype(jnp.uint8), format.dtype)


def to_bytes(codes: jax.Array) -> jax.Array:
    """8-bit codes as uint8. XLA on CPU slices, stacks and moves float8 arrays by way of float16."""
    return lax.bitcast_convert_type(codes, jnp.uint8)


def to_bits(codes: jax.Array) -> jax.Array:
    """Codes as unsigned integers of their width."""
    return lax.bitcast_convert_type(codes, bits_of(codes.dtype))


def bits_of(dtype: Any) -> Any:
    """The unsigned integers of a dtype's width."""
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(jnp.dtype(dtype).itemsize, jnp.uint32))


def select(mask: jax.Array, x: Any, otherwise: Any) -> jax.Array:
    """`jnp.where` of arrays of one shape and dtype, one of which may be a number: a third of the operations,
    which add up where each product of a model has a few."""
    like = otherwise if isinstance(x, int | float) else x
    cases = (lax.full_like(like, case) if isinstance(case, int | float) else case for case in (x, otherwise))
    return lax.select(mask, *cases)
