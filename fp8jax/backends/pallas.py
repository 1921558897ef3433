"""The Pallas backend: kernels for FP8 operands with float32 scales of 1x128 and 128x128 blocks.

Both operands have the contracted axis last, as GPU instructions read them. The product of two blocks is
scaled before it is added to the output's float32 sum. Hopper adds the 128 products of a block in about 14
bits. On a CPU it is the `reference`: FP8 values and their products are exact in float32.

Hopper GPUs have the kernel of `hopper`, written in Mosaic GPU. The kernel here, in Triton, is for other GPUs.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from fp8jax.backends import reference, tensor_core
from fp8jax.backends.base import Backend, Call, Device, lacks_fp8
from fp8jax.quantization import ScaledArray
from fp8jax.quantization.kernels.partition import split_by_devices
from fp8jax.quantization.kernels.tiles import rows_in_reach, triton

# Rows and columns of a block.
TILE = 128


class Tiling(NamedTuple):
    """How the kernel in Triton is split; `examples/bench/gemm.py --tilings` times others.

    The default was the fastest of 6 on an H100. Compiled for it the kernel has FP8 instructions and
    asynchronous copies, and spills no register.
    """

    rows: int = 128  # of a tile of the output, a divisor of `TILE`
    columns: int = 128
    warps: int = 8
    stages: int = 3  # tiles of the operands in shared memory
    group: int = 16  # rows of tiles that are computed together


TILING = Tiling()

# Whether the kernel is interpreted, to test it on a CPU.
INTERPRET = False

# The names of Hopper GPUs, such as "NVIDIA H200" and "NVIDIA GH200 480GB".
_HOPPER = re.compile(r"\bG?H\d+")


def supports(device: Device | None, is_batched: bool) -> str | None:
    """See `fp8jax.backends.base.Backend`."""
    del is_batched
    device = device or Device.here()
    if reason := lacks_fp8(device):
        return reason
    is_hopper = device.capability is not None and device.capability[0] == 9
    if triton or device.platform == "cpu" or (is_hopper and _hopper()):
        return None
    return "this JAX has no Pallas for Triton, which has the GEMMs of block; use the recipe te"


def gemm(lhs: ScaledArray, rhs: ScaledArray, out_dtype: Any, tiling: Tiling | None = None) -> jax.Array:
    """The GEMM of operands with float32 scales of 1x128 and 128x128 blocks.

    Args:
        lhs, rhs: (batch, m, k) and (batch, n, k).
        out_dtype: the output's dtype.
        tiling: of the kernel in Triton, which then runs on Hopper, too. None: the GPU's kernel.

    Returns:
        (batch, m, n)
    """
    m, n = lhs.shape[-2], rhs.shape[-2]
    a, b = (_whole_tiles(x.data, TILE) for x in (lhs, rhs))
    is_square = rhs.scale.shape[-2] * TILE == rhs.shape[-2] and rhs.shape[-2] > 1
    of_a = _whole_tiles(lhs.scale, TILE)
    of_b = _whole_tiles(rhs.scale, 1 if is_square else TILE)
    multiply = split_by_devices(
        functools.partial(_whole_gemm, out_dtype, tiling),
        "b m k, b n k, b m k, b n k -> b m n",
        dict.fromkeys("mnk", TILE),
        summed="k",
    )
    return multiply(a, b, of_a, of_b)[:, :m, :n]


def _whole_gemm(
    out_dtype: Any, tiling: Tiling | None, a: jax.Array, b: jax.Array, of_a: jax.Array, of_b: jax.Array
) -> jax.Array:
    """The GPU's kernel, of whole tiles and the scales of rows of `a` and of blocks or rows of `b`."""
    if tiling is None and _is_hopper() and (hopper := _hopper()) is not None:
        return hopper.gemm(a, b, of_a, of_b, out_dtype)
    return _triton(out_dtype, tiling or TILING, a, b, of_a, jnp.swapaxes(of_b, -1, -2))


def _is_hopper() -> bool:
    """Whether the program is for a Hopper GPU: the one of its mesh, or JAX's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return _HOPPER.search(device.device_kind) is not None
    capability = Device.here().capability
    return capability is not None and capability[0] == 9


def _hopper() -> Any:
    """The module of Hopper's kernel; None where JAX's Mosaic GPU lacks what the kernel uses."""
    try:
        from fp8jax.backends import hopper
    except (ImportError, AttributeError):
        return None
    return hopper


def _triton(
    out_dtype: Any, tiling: Tiling, a: jax.Array, b: jax.Array, of_a: jax.Array, of_b: jax.Array
) -> jax.Array:
    """The kernel in Triton; `of_b` has an axis for the blocks of k before the one of `b`'s rows."""
    (batch, m, k), n = a.shape, b.shape[-2]
    rows, columns, warps, stages, group = tiling
    counts = (m // rows, n // columns)
    is_square = of_b.shape[-1] < n
    a, b = (_with_rows(x, rows_in_reach(x.shape)) for x in (a, b))

    def place(t: Any) -> tuple[Any, Any]:
        """Row and column of tile number `t`: consecutive tiles share rows and columns, in the GPU's cache."""
        band, inside = lax.div(t, np.int32(group * counts[1])), lax.rem(t, np.int32(group * counts[1]))
        height = lax.min(counts[0] - band * group, np.int32(group))
        return band * group + lax.rem(inside, height), lax.div(inside, height)

    def scales_of_b(t: Any, g: Any) -> tuple[Any, ...]:
        column = place(t)[1]
        return (g, 0, column * columns // TILE if is_square else column)

    return pl.pallas_call(
        functools.partial(_tile, k // TILE),
        grid=(counts[0] * counts[1], batch),
        in_specs=[
            pl.BlockSpec((None, rows, k), lambda t, g: (g, place(t)[0], 0)),
            pl.BlockSpec((None, columns, k), lambda t, g: (g, place(t)[1], 0)),
            pl.BlockSpec((None, rows, k // TILE), lambda t, g: (g, place(t)[0], 0)),
            pl.BlockSpec((None, k // TILE, 1 if is_square else columns), scales_of_b),
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda t, g: (g, *place(t))),
        out_shape=jax.ShapeDtypeStruct((batch, m, n), out_dtype),
        compiler_params=triton and triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=INTERPRET,
        name="block_gemm",
    )(a, b, of_a, of_b)


def _tile(steps: int, a: Any, b: Any, of_a: Any, of_b: Any, out: Any) -> None:
    """One tile of the output."""

    def step(i: Any, sums: jax.Array) -> jax.Array:
        depth = pl.ds(i * TILE, TILE)
        # Read before the product, which hides it, and as vectors: of a column of a matrix, each thread would
        # read an entry for each of its sums.
        if of_b.shape[1] == 1:
            scales = (of_a[:, i] * of_b[i, 0])[:, None]
        else:
            scales = of_a[:, i][:, None] * of_b[i, :][None]
        return sums + tensor_core.dot(a[:, depth], b[:, depth]) * scales

    sums = lax.fori_loop(0, steps, step, jnp.zeros(out.shape, jnp.float32))
    out[...] = sums.astype(out.dtype)


def _whole_tiles(x: jax.Array, size: int) -> jax.Array:
    """`x` with its rows padded to a multiple of `size`."""
    return _with_rows(x, x.shape[1] + -x.shape[1] % size)


def _with_rows(x: jax.Array, count: int) -> jax.Array:
    """`x` padded to so many rows."""
    return jnp.pad(x, [(0, 0), (0, count - x.shape[1]), (0, 0)]) if count > x.shape[1] else x


BACKEND = Backend(
    gemms="a Pallas kernel",
    norms="on a GPU norms and activations are stored, and a Pallas kernel quantizes them",
    granularities=("1x128",),
    dot=reference.dot_by(gemm),
    supports=supports,
    is_call_on_gpu=True,
    calls=(  # in Triton, and for Hopper
        Call("__gpu$xla.gpu.triton", "pallas", is_kernel=True, share="pallas"),
        Call("mosaic_gpu_v2", "pallas", is_kernel=True, share="mosaic"),
    ),
    primitive="pallas_call",
)
