"""The XLA backend: FP8 GEMMs by cuBLASLt on GPU, exact emulation on CPU.

The platform is selected at lowering, so a program traced on a laptop compiles for an absent GPU.

GPU: XLA rewrites a dot with operands `convert(fp8) * scalar` to one `__cublas$lt$matmul$f8` call. The call
takes the float32 scales, accumulates in float32 and writes `out_dtype`. Precision DEFAULT is fast
accumulation, HIGHEST is precise.

CPU: FP8 values and their products are exact in float32, so a float32 dot computes the same as an FP8 dot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.backends.base import Backend
from fp8jax.platforms import by_platform
from fp8jax.quantization import ScaledArray


def dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    """See `fp8jax.backends.base.Backend`."""
    options = {"dimension_numbers": dimension_numbers, "out_dtype": out_dtype, "precise": precise}
    return by_platform(lhs, rhs, cpu=_dot_float32, default=_dot_scaled, **options)


def _dot_float32(
    lhs: ScaledArray, rhs: ScaledArray, *, dimension_numbers: Any, out_dtype: Any, precise: bool
) -> jax.Array:
    del precise  # float32 accumulation is always precise
    operands = lhs.data.astype(jnp.float32), rhs.data.astype(jnp.float32)
    out = lax.dot_general(*operands, dimension_numbers, preferred_element_type=jnp.float32)
    # Two multiplications, because the product of the scales can overflow or underflow in float32.
    return (out * lhs.scale * rhs.scale).astype(out_dtype)


def _dot_scaled(
    lhs: ScaledArray, rhs: ScaledArray, *, dimension_numbers: Any, out_dtype: Any, precise: bool
) -> jax.Array:
    # XLA's pattern needs scales in `out_dtype`; cuBLASLt gets the float32 scales.
    left, right = (x.data.astype(out_dtype) * x.scale.astype(out_dtype) for x in (lhs, rhs))
    precision = lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT
    return lax.dot_general(
        left, right, dimension_numbers, precision=precision, preferred_element_type=out_dtype
    )


BACKEND = Backend(
    gemms="cuBLASLt, through XLA",
    norms="on a GPU XLA computes a norm within the cast of its output to FP8, "
    "and an activation with its amax",
    granularities=("tensor",),
    dot=dot,
)
