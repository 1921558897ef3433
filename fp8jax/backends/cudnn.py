"""The cuDNN backend: `jax.nn.scaled_matmul`, one call on Blackwell, for MXFP8 and NVFP4 operands.

Both operands have the contracted axis last, as GPU instructions read them. On a CPU it is the `reference`:
the values and their products are exact in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.backends import reference
from fp8jax.backends.base import FIRST_WITH_BLOCKS, Backend, Call, Device, lacks, lacks_fp8
from fp8jax.quantization import PackedE2M1, ScaledArray, is_scaled
from fp8jax.quantization.kernels.partition import split_by_devices

# cuDNN's GEMMs are split along the contracted axis in multiples of it.
TILE = 128


def supports(device: Device | None, is_batched: bool) -> str | None:
    """See `fp8jax.backends.base.Backend`."""
    del is_batched
    return lacks_fp8(device) or lacks(device, "MXFP8 or NVFP4", FIRST_WITH_BLOCKS, "block or te")


def gemm(lhs: ScaledArray, rhs: ScaledArray, out_dtype: Any) -> jax.Array:
    """One cuDNN call for MXFP8 and for NVFP4, whose scales of tensors are multiplied after it."""
    codes = [x.data.floats if isinstance(x.data, PackedE2M1) else x.data for x in (lhs, rhs)]
    scales = [_by_row(x) for x in (lhs, rhs)]
    if not is_scaled(lhs.scale):
        return _scaled_matmul(out_dtype, *codes, *scales)
    # Without the scales of tensors it exceeds float16's range.
    out = _scaled_matmul(jnp.float32 if out_dtype == jnp.float16 else out_dtype, *codes, *scales)
    return (out.astype(jnp.float32) * lhs.scale.scale * rhs.scale.scale).astype(out_dtype)


def _scaled_matmul(dtype: Any, *operands: jax.Array) -> jax.Array:
    """`jax.nn.scaled_matmul`; JAX's own rule for `jax.vmap` takes only operands that are all mapped."""
    multiply = functools.partial(jax.nn.scaled_matmul, preferred_element_type=dtype)
    split = split_by_devices(multiply, "b m k, b n k, b m k, b n k -> b m n", {"k": TILE}, summed="k")
    return split(*operands)


def _by_row(x: ScaledArray) -> jax.Array:
    """The scales of blocks, one for each row and block of columns."""
    scale = x.scale.data if is_scaled(x.scale) else x.scale
    return jnp.repeat(scale, x.shape[-2] // scale.shape[-2], axis=-2)


BACKEND = Backend(
    gemms="cuDNN, through jax.nn.scaled_matmul",
    norms="on a GPU norms and activations are stored, and a Pallas kernel quantizes them",
    granularities=("1x32", "1x16"),
    dot=reference.dot_by(gemm),
    supports=supports,
    is_call_on_gpu=True,
    calls=(Call("__cudnn$blockScaledDot", "cudnn"),),
    primitive="scaled_matmul",
)
