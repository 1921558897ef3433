"""Kernels that are stored as block-scaled operands, as frozen kernels under adapters are.

One copy serves both GEMMs of a kernel. Square blocks have the same codes in both. Blocks of one row are those
of the first GEMM; for the second one the kernel is dequantized and quantized again along its other axis. Of
powers of two as scales that changes only numbers below 2**-13 of the largest one of their new block.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax import formats
from fp8jax.quantization import BlockMethod, PackedE2M1, ScaledArray, amax, quantize_in


def _is_packed(method: BlockMethod) -> bool:
    """Whether a byte has two codes."""
    return method.format == formats.E2M1


def blocks_of_kernel(method: BlockMethod, shape: tuple[int, ...], inputs: int) -> tuple[int, ...] | None:
    """The number of blocks along each axis of a stored kernel.

    Args:
        method: how the kernel is quantized for its first GEMM.
        shape: the kernel's, with the contracted axes first.
        inputs: the product of the contracted axes.

    Returns:
        None if the axes are not whole blocks. Then the kernel cannot be stored in blocks.
    """
    if _is_packed(method) and shape[-1] % 2:
        return None
    rows, columns = method.block
    split = next(i for i in range(len(shape) + 1) if math.prod(shape[:i]) == inputs)
    counts = []
    for dims, size in ((shape[:split], columns), (shape[split:], rows)):
        of_dims = []
        for dim in reversed(dims):
            if size % dim and dim % size:
                return None
            of_dims.insert(0, max(dim // size, 1))
            size = max(size // dim, 1)
        if size > 1:
            return None
        counts += of_dims
    return tuple(counts)


def stored_kernel(
    method: BlockMethod, x: jax.Array, layers: tuple[int, ...], inputs: int
) -> ScaledArray | None:
    """A kernel, or a stack of them, to be stored as the operand of its first GEMM: codes and scales.

    Args:
        method: see `blocks_of_kernel`.
        x: float array, shape=(*layers, *shape).
        layers: leading axes of stacked layers.
        inputs: see `blocks_of_kernel`.

    Returns:
        None if `blocks_of_kernel` is None, or for "block_float32", whose scales are no powers of two. A
        bfloat16 `x` is marked by bfloat16 scales.
    """
    shape = x.shape[len(layers) :]
    if method.scale == "float32":
        return None
    blocks = blocks_of_kernel(method, shape, inputs)
    if blocks is None:
        return None
    whole_amax = amax(x, (*layers, *(1,) * len(shape))) if _is_packed(method) else None
    return quantize_in(x, (*layers, *blocks), method, whole_amax=whole_amax).with_own_dtype(x.dtype)


def operand_of_stored(method: BlockMethod, q: ScaledArray, inputs: int, gemm: int) -> ScaledArray | None:
    """A kernel from `stored_kernel` as the operand of its GEMM number `gemm`.

    Returns:
        None if `q` is stored in another way, or if its blocks are those of the other GEMM.
    """
    if q.data.dtype != method.format.dtype or q.bits.shape != blocks_of_kernel(method, q.shape, inputs):
        return None
    if gemm == 1 and method.block[0] != method.block[1]:
        return None

    def matrix(x: jax.Array, rows: int) -> jax.Array:
        x = x.reshape(rows, x.size // rows)
        return x if gemm else x.T

    rows, scale = inputs // method.block[1], q.scale
    if isinstance(scale, ScaledArray):
        data = q.data.bytes.reshape(inputs, -1)
        data = PackedE2M1(data) if gemm else PackedE2M1.pack(matrix(q.data.codes, inputs))
        of_blocks = matrix(scale.data.astype(formats.E4M3.dtype), rows)
        return ScaledArray(data, ScaledArray(of_blocks, scale.scale.reshape(1, 1)))
    if method.scale == "E8M0":
        codes = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32) >> np.uint32(23)
        scale = lax.bitcast_convert_type(codes.astype(jnp.uint8), formats.E8M0.dtype)
        return ScaledArray(matrix(q.data, inputs), matrix(scale, rows))
    return ScaledArray(matrix(q.data, inputs), matrix(scale.astype(jnp.float32), rows))
