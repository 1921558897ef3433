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

from fp8jax.platforms import by_platform
from fp8jax.quantization import ScaledArray

_Operand = tuple[jax.Array, jax.Array]  # data and scale

NORMS = "on a GPU XLA computes a norm within the cast of its output to FP8, and an activation with its amax"


def supports(*, is_batched: bool = False) -> str | None:
    """None; this backend runs wherever JAX runs."""
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
    """See `fp8jax.backends`."""
    options = {"dimension_numbers": dimension_numbers, "out_dtype": out_dtype, "precise": precise}
    operands = (lhs.data, lhs.scale), (rhs.data, rhs.scale)
    return by_platform(*operands, cpu=_dot_float32, default=_dot_scaled, **options)


def _dot_float32(
    lhs: _Operand, rhs: _Operand, *, dimension_numbers: Any, out_dtype: Any, precise: bool
) -> jax.Array:
    del precise  # float32 accumulation is always precise
    (lhs_data, lhs_scale), (rhs_data, rhs_scale) = lhs, rhs
    operands = lhs_data.astype(jnp.float32), rhs_data.astype(jnp.float32)
    out = lax.dot_general(*operands, dimension_numbers, preferred_element_type=jnp.float32)
    # Two multiplications, because the product of the scales can overflow or underflow in float32.
    return (out * lhs_scale * rhs_scale).astype(out_dtype)


def _dot_scaled(
    lhs: _Operand, rhs: _Operand, *, dimension_numbers: Any, out_dtype: Any, precise: bool
) -> jax.Array:
    # XLA's pattern needs scales in `out_dtype`; cuBLASLt gets the float32 scales.
    left, right = (data.astype(out_dtype) * scale.astype(out_dtype) for data, scale in (lhs, rhs))
    precision = lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT
    return lax.dot_general(
        left, right, dimension_numbers, precision=precision, preferred_element_type=out_dtype
    )
