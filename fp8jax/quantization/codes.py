"""Codes as bytes and back: residuals and slices of float8 arrays are stored as uint8.

XLA on CPU slices and stacks float8 arrays by way of float16.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from fp8jax.formats import Format
from fp8jax.quantization.array import ScaledArray, is_scaled
from fp8jax.quantization.casts import to_bytes
from fp8jax.quantization.packed import PackedE2M1


def as_bytes(q: Any) -> Any:
    """A `ScaledArray` with its codes as bytes; packed codes and float arrays stay unchanged."""
    if not is_scaled(q) or isinstance(q.data, PackedE2M1):
        return q
    return ScaledArray(to_bytes(q.data), q.scale)


def as_codes(q: Any, format: Format) -> Any:
    """The inverse of `as_bytes`."""
    if not is_scaled(q) or isinstance(q.data, PackedE2M1):
        return q
    return ScaledArray(lax.bitcast_convert_type(q.data, format.dtype), q.scale)


def on_data(function: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """`function` of an array, or of the codes of a `ScaledArray`."""
    return ScaledArray(function(x.data), x.scale) if is_scaled(x) else function(x)
