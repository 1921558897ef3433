"""GEMMs of operands with a scale for each block.

Both operands have the contracted axis last, (m, k) and (n, k), as GPU instructions read them.

| operands | CPU | Hopper | Blackwell |
|---|---|---|---|
| 1x128 and 128x128 | exact emulation | the Pallas kernel | the Pallas kernel |
| MXFP8, NVFP4 | exact emulation | not there | `jax.nn.scaled_matmul`, one cuDNN call |
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fp8jax.partition import split_by_devices
from fp8jax.platforms import by_platform, capability_of
from fp8jax.quantization import PackedE2M1, ScaledArray, is_scaled

# Rows, columns and depth of a tile of the Pallas kernel: one block.
TILE = 128

# Compute capability of the first GPUs with GEMMs of MXFP8 and NVFP4.
FIRST_WITH_BLOCKS = (10, 0)

# Whether the kernel is interpreted, to test it on a CPU.
INTERPRET = False


def why_not(scaling: str) -> str | None:
    """None, or the reason why JAX's default device has no GEMMs for this scaling, and what to use instead."""
    capability = capability_of(jax.devices()[0])
    if capability is None:
        return None
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if scaling in ("mxfp8", "nvfp4") and capability < FIRST_WITH_BLOCKS:
        return f"{shown} has no block-scaled GEMMs, which need 10.0; use the recipe block or te"
    return f"{shown} has no FP8 GEMMs, which need 8.9; use the recipe bf16" if capability < (8, 9) else None


def dot(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any) -> jax.Array:
    """([batch,] m, k) times ([batch,] n, k), accumulated in float32.

    The product of two blocks is accumulated in float32 and scaled before it is added to the output's sum.
    """
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), out_dtype)
    return by_platform(lhs, rhs, cpu=_emulated, default=_on_gpu, is_deferred=False, out_dtype=out_dtype)


def _emulated(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any) -> jax.Array:
    batch = tuple(range(lhs.ndim - 2))
    numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))
    out = lax.dot_general(lhs.dequantize(), rhs.dequantize(), numbers, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _on_gpu(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any) -> jax.Array:
    has_float32_scales = not is_scaled(lhs.scale) and lhs.scale.dtype == jnp.float32
    gemm = _tiled if has_float32_scales else _cudnn
    if lhs.ndim == 2:
        lhs, rhs = (jax.tree.map(lambda leaf: leaf[None], x) for x in (lhs, rhs))
        return gemm(lhs, rhs, out_dtype)[0]
    return gemm(lhs, rhs, out_dtype)


def _cudnn(lhs: ScaledArray, rhs: ScaledArray, out_dtype: Any) -> jax.Array:
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
    gemm = split_by_devices(multiply, "b m k, b n k, b m k, b n k -> b m n", {"k": TILE}, summed="k")
    return gemm(*operands)


def _by_row(x: ScaledArray) -> jax.Array:
    """The scales of blocks, one for each row and block of columns."""
    scale = x.scale.data if is_scaled(x.scale) else x.scale
    return jnp.repeat(scale, x.shape[-2] // scale.shape[-2], axis=-2)


def _tiled(lhs: ScaledArray, rhs: ScaledArray, out_dtype: Any) -> jax.Array:
    """A Pallas kernel for float32 scales of 1x128 and 128x128 blocks."""
    m, n = lhs.shape[-2], rhs.shape[-2]
    a, b = (_whole_tiles(x.data, TILE) for x in (lhs, rhs))
    is_square = rhs.scale.shape[-2] * TILE == rhs.shape[-2] and rhs.shape[-2] > 1
    width = 1 if is_square else TILE
    of_a = _whole_tiles(lhs.scale, TILE)
    of_b = jnp.swapaxes(_whole_tiles(rhs.scale, width), -1, -2)
    gemm = split_by_devices(
        functools.partial(_tiles, out_dtype),
        "b m k, b n k, b m k, b k n -> b m n",
        dict.fromkeys("mnk", TILE),
        summed="k",
    )
    return gemm(a, b, of_a, of_b)[:, :m, :n]


def _tiles(out_dtype: Any, a: jax.Array, b: jax.Array, of_a: jax.Array, of_b: jax.Array) -> jax.Array:
    """The kernel, of whole tiles and the scales of rows of `a` and of blocks or rows of `b`."""
    (batch, m, k), n = a.shape, b.shape[-2]
    grid, width = (batch, m // TILE, n // TILE), of_b.shape[-1] * TILE // n
    return pl.pallas_call(
        functools.partial(_tile, k // TILE),
        grid=grid,
        in_specs=[
            pl.BlockSpec((None, TILE, k), lambda g, i, j: (g, i, 0)),
            pl.BlockSpec((None, TILE, k), lambda g, i, j: (g, j, 0)),
            pl.BlockSpec((None, TILE, k // TILE), lambda g, i, j: (g, i, 0)),
            pl.BlockSpec((None, k // TILE, width), lambda g, i, j: (g, 0, j)),
        ],
        out_specs=pl.BlockSpec((None, TILE, TILE), lambda g, i, j: (g, i, j)),
        out_shape=jax.ShapeDtypeStruct((batch, m, n), out_dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=INTERPRET,
    )(a, b, of_a, of_b)


def _tile(steps: int, a: Any, b: Any, of_a: Any, of_b: Any, out: Any) -> None:
    """One tile of the output."""

    def step(i: Any, sums: jax.Array) -> jax.Array:
        depth = pl.ds(i * TILE, TILE)
        part = triton.dot(a[:, depth], b[:, depth], trans_b=True)
        return sums + part * of_a[:, pl.ds(i, 1)] * of_b[pl.ds(i, 1), :]

    out[...] = lax.fori_loop(0, steps, step, jnp.zeros((TILE, TILE), jnp.float32)).astype(out.dtype)


def _whole_tiles(x: jax.Array, size: int) -> jax.Array:
    """`x` with its rows padded to a multiple of `size`."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), (0, 0)]) if x.shape[1] % size else x
