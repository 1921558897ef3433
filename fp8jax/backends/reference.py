"""The reference backend: dequantize, matmul in float32, cast.

It is slow and exact; the other backends are tested against it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.quantization import ScaledArray

NORMS = "norms and activations are stored, and then cast to FP8"


def supports(*, is_batched: bool = False) -> str | None:
    """None; this backend runs everywhere."""
    del is_batched
    return None


def dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    """The matmul of the dequantized operands; see `fp8jax.backends`."""
    del precise
    return lax.dot_general(
        lhs.dequantize(),
        rhs.dequantize(),
        dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).astype(out_dtype)
