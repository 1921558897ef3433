"""GEMMs of operands with a scale for each block.

Both operands have the contracted axis last, (m, k) and (n, k), as GPU instructions read them.

| operands | CPU | Hopper | Blackwell |
|---|---|---|---|
| 1x128 and 128x128 | exact emulation | the Pallas kernel | the Pallas kernel |
| MXFP8, NVFP4 | exact emulation | not there | `jax.nn.scaled_matmul`, one cuDNN call |
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fp8jax.backends import tensor_core
from fp8jax.platforms import by_platform, capability_of
from fp8jax.quantization import PackedE2M1, ScaledArray, is_scaled
from fp8jax.quantization.kernels.partition import split_by_devices

# Rows and columns of a block.
TILE = 128


class Tiling(NamedTuple):
    """How the Pallas kernel is split; `examples/bench/gemm.py --tilings` times others.

    Compiled for Hopper it has FP8 instructions and asynchronous copies, and spills no register.
    """

    rows: int = 128  # of a tile of the output, a divisor of `TILE`
    columns: int = 128
    warps: int = 8
    stages: int = 4  # tiles of the operands in shared memory
    group: int = 8  # rows of tiles that are computed together


TILING = Tiling()


# Compute capability of the first GPUs with GEMMs of FP8, and of MXFP8 and NVFP4.
FIRST_WITH_FP8, FIRST_WITH_BLOCKS = (8, 9), (10, 0)

# Whether the kernel is interpreted, to test it on a CPU.
INTERPRET = False


def why_not(scaling: str) -> str | None:
    """None, or the reason why JAX's default device has no GEMMs for this scaling, and what to use instead."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    capability = capability_of(device)
    if capability is None:
        return f"{device.device_kind} is no NVIDIA GPU, and has no GEMMs of blocks here; use the recipe te"
    return lacks(capability, scaling)


def backend_of(scaling: str) -> str:
    """The backend of block-scaled GEMMs on JAX's default device: "xla" on a CPU, else "pallas" or "cudnn"."""
    if jax.devices()[0].platform == "cpu":
        return "xla"
    return "cudnn" if scaling in ("mxfp8", "nvfp4") else "pallas"


def lacks(capability: tuple[int, int], scaling: str) -> str | None:
    """None, or the reason why GPUs of a compute capability have no GEMMs for a scaling, and what to use."""
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if capability < FIRST_WITH_FP8:
        return f"{shown} has no FP8 GEMMs, which need 8.9; use the recipe bf16"
    if scaling in ("mxfp8", "nvfp4") and capability < FIRST_WITH_BLOCKS:
        return f"{shown} has no GEMMs of MXFP8 or NVFP4, which need 10.0; use the recipe block or te"
    return None


def refuse(program: Any, capability: tuple[int, int]) -> str | None:
    """None, or the reason why a program has block-scaled GEMMs that a GPU does not have.

    XLA would dequantize the operands of cuDNN's and say nothing; JAX does not lower FP8 in Pallas kernels.

    Args:
        program: its closed jaxpr.
        capability: the GPU's compute capability.
    """
    scalings = _scalings(program.jaxpr, set())
    if "mxfp8" in scalings:
        return lacks(capability, "mxfp8")
    return lacks(capability, "block") if scalings else None


def _scalings(jaxpr: Any, seen: set[int]) -> set[str]:
    """The scalings of the block-scaled GEMMs in a jaxpr: "mxfp8" for cuDNN's, "block" for a Pallas kernel."""
    found: set[str] = set()
    if id(jaxpr) in seen:
        return found
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith("scaled_matmul"):
            found.add("mxfp8")
        elif name == "pallas_call" and any(map(_is_fp8, (*equation.invars, *equation.outvars))):
            found.add("block")
        for inner in jex.jaxprs_in_params(equation.params):
            found |= _scalings(inner, seen)
    return found


def _is_fp8(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize == 1


def dot(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, tiling: Tiling = TILING) -> jax.Array:
    """([batch,] m, k) times ([batch,] n, k), accumulated in float32.

    The product of two blocks is scaled before it is added to the output's float32 sum. Hopper adds the 128
    products of a block in about 14 bits.
    """
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), out_dtype)
    static = {"out_dtype": out_dtype, "tiling": tiling}
    return by_platform(lhs, rhs, cpu=_emulated, default=_on_gpu, is_deferred=False, **static)


def _emulated(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, tiling: Tiling) -> jax.Array:
    batch = tuple(range(lhs.ndim - 2))
    numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))
    out = lax.dot_general(lhs.dequantize(), rhs.dequantize(), numbers, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _on_gpu(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, tiling: Tiling = TILING) -> jax.Array:
    has_float32_scales = not is_scaled(lhs.scale) and lhs.scale.dtype == jnp.float32
    gemm = functools.partial(_tiled, tiling=tiling) if has_float32_scales else _cudnn
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


def _tiled(lhs: ScaledArray, rhs: ScaledArray, out_dtype: Any, tiling: Tiling = TILING) -> jax.Array:
    """A Pallas kernel for float32 scales of 1x128 and 128x128 blocks."""
    m, n = lhs.shape[-2], rhs.shape[-2]
    a, b = (_whole_tiles(x.data, TILE) for x in (lhs, rhs))
    is_square = rhs.scale.shape[-2] * TILE == rhs.shape[-2] and rhs.shape[-2] > 1
    of_a = _whole_tiles(lhs.scale, TILE)
    of_b = jnp.swapaxes(_whole_tiles(rhs.scale, 1 if is_square else TILE), -1, -2)
    gemm = split_by_devices(
        functools.partial(_tiles, out_dtype, tiling),
        "b m k, b n k, b m k, b k n -> b m n",
        dict.fromkeys("mnk", TILE),
        summed="k",
    )
    return gemm(a, b, of_a, of_b)[:, :m, :n]


def _tiles(
    out_dtype: Any, tiling: Tiling, a: jax.Array, b: jax.Array, of_a: jax.Array, of_b: jax.Array
) -> jax.Array:
    """The kernel, of whole tiles and the scales of rows of `a` and of blocks or rows of `b`."""
    (batch, m, k), n = a.shape, b.shape[-2]
    rows, columns, warps, stages, group = tiling
    counts = (m // rows, n // columns)
    is_square = of_b.shape[-1] < n

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
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=INTERPRET,
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
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), (0, 0)]) if x.shape[1] % size else x
