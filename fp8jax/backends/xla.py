"""The XLA backend: FP8 GEMMs by cuBLASLt on GPU, exact emulation on CPU.

The platform is selected at lowering, so a program traced on a laptop compiles for an absent GPU.

GPU: XLA rewrites a dot with operands `convert(fp8) * scalar` to one `__cublas$lt$matmul$f8` call. The call
takes the float32 scales, accumulates in float32 and writes `out_dtype`. Precision DEFAULT is fast
accumulation, HIGHEST is precise.

CPU: FP8 values are exact in bfloat16 and float32, and their products are exact in float32, so a dot in either
dtype computes the same as an FP8 dot. bfloat16 is faster on processors with bfloat16 instructions, float32 on
others.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.platforms import by_platform
from fp8jax.quantization import ScaledArray

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
    return by_platform(
        lhs.data,
        lhs.scale,
        rhs.data,
        rhs.scale,
        cpu=_dot_widened,
        default=_dot_scaled,
        dimension_numbers=dimension_numbers,
        out_dtype=out_dtype,
        precise=precise,
    )


def _dot_widened(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    del precise  # float32 accumulation is always precise
    wide = jnp.bfloat16 if _has_bfloat16_instructions() else jnp.float32
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    out = lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32)
    # Two multiplications, because the product of the scales can overflow or underflow in float32.
    return (out * lhs_scale * rhs_scale).astype(out_dtype)


def _dot_scaled(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    # XLA's pattern needs scales in `out_dtype`; cuBLASLt gets the float32 scales.
    return lax.dot_general(
        lhs.astype(out_dtype) * lhs_scale.astype(out_dtype),
        rhs.astype(out_dtype) * rhs_scale.astype(out_dtype),
        dimension_numbers,
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=out_dtype,
    )


@functools.cache
def _has_bfloat16_instructions() -> bool:
    """Whether this processor has bfloat16 instructions, from Linux's /proc/cpuinfo; False elsewhere."""
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
