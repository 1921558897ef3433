"""The reference backend: dequantize, matmul in float32, cast.

It is slow and exact; the other backends are tested against it.
"""

from collections.abc import Callable
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
    """The matmul of the dequantized operands; see `fp8jax.backends.base.Backend`."""
    del precise
    return lax.dot_general(
        lhs.dequantize(),
        rhs.dequantize(),
        dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).astype(out_dtype)


def dot_by(kernel: Callable[[ScaledArray, ScaledArray, Any], jax.Array]) -> Callable[..., jax.Array]:
    """The `dot` of a backend with a kernel for GPUs; a CPU computes the reference, which is exact.

    Args:
        kernel: `kernel(lhs, rhs, out_dtype)` of (batch, m, k) and (batch, n, k), which are not empty.
    """

    def on_gpu(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, **_: Any) -> jax.Array:
        if 0 in (*lhs.shape, *rhs.shape):
            return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), out_dtype)
        if lhs.ndim > 2:
            return kernel(lhs, rhs, out_dtype)
        lhs, rhs = (jax.tree.map(lambda leaf: leaf[None], x) for x in (lhs, rhs))
        return kernel(lhs, rhs, out_dtype)[0]

    def by_device(lhs: Any, rhs: Any, dimension_numbers: Any, **options: Any) -> jax.Array:
        options["dimension_numbers"] = dimension_numbers
        return by_platform(lhs, rhs, cpu=dot, default=on_gpu, is_deferred=False, **options)

    return by_device


BACKEND = Backend(
    gemms="a float32 matmul of dequantized operands",
    norms="norms and activations are stored, and then cast to FP8",
    granularities=("tensor", "1x128", "1x32", "1x16"),
    dot=dot,
    calls=(),
    is_reference=True,
)
