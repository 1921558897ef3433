"""The GEMM kernel of the `pallas` backend for Hopper: float32 scales of 1x128 and 128x128 blocks.

    out = hopper.gemm(a, b, of_a, of_b, jnp.bfloat16)     # (batch, m, k) and (batch, n, k)

The kernel is written in Pallas's Mosaic GPU, which has Hopper's asynchronous copies to shared memory (TMA)
and its asynchronous GEMMs (wgmma). A multiprocessor has three warpgroups. Two multiply: while the GEMM of one
runs, the other scales and adds. The third copies. The GEMM of a block of k has a new accumulator, which is
scaled and added to float32 sums. Importing the module fails if JAX's Mosaic GPU lacks what the kernel uses.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Sides of a block with a scale, and the columns of a tile of the output.
BLOCK = 128
# Rows of a wgmma instruction, warpgroups that multiply, and the rows of a wave: one instruction of each.
ROWS, MULTIPLYING = 64, 2
WAVE = ROWS * MULTIPLYING
# Blocks of k in shared memory. No more fit into it.
STAGES = 4
# Rows of tiles that are computed together: they share columns in the level-2 cache.
GROUP = 8
# Multiprocessors of an H100 (SXM) and an H200. GPUs with fewer compute the same, not as fast as they could.
CORES = 132

# A `plgpu.InterpretGPUParams`, to test the kernel on a CPU.
INTERPRET = None

# The layout of operands in shared memory.
_SWIZZLE = plgpu.SwizzleTransform(128)
_OPERAND = (plgpu.TilingTransform((8, BLOCK)), _SWIZZLE)


class Tiles(NamedTuple):
    """The sizes of a batched GEMM, and its tiles. The matrices of a batch are below each other."""

    batch: int
    m: int
    n: int
    k: int
    is_vector: bool  # whether each row of rhs has a scale of its own, and not each 128

    @property
    def waves(self) -> int:
        """GEMMs of a warpgroup for a block of k. Two are faster, since both read the same block of rhs."""
        return 1 if self.m % (2 * WAVE) else 2

    @property
    def rows(self) -> int:
        """Rows of a tile of the output."""
        return self.waves * WAVE

    @property
    def steps(self) -> int:
        """Blocks of k."""
        return self.k // BLOCK

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles of one matrix along m and n."""
        return self.m // self.rows, self.n // BLOCK

    @property
    def total(self) -> int:
        """Tiles of all matrices."""
        return self.batch * self.counts[0] * self.counts[1]

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """The first row of a tile in lhs and the output, its first row in rhs, and its first column."""
        of_matrix = self.counts[0] * self.counts[1]
        matrix = lax.div(number, _int(of_matrix))
        # Consecutive tiles share rows and columns, in the GPU's cache.
        i, j = plgpu.planar_snake(lax.rem(number, _int(of_matrix)), self.counts, 0, GROUP)
        return matrix * self.m + i * self.rows, matrix * self.n + j * BLOCK, j * BLOCK


class _Shared(NamedTuple):
    """Shared memory and barriers of a multiprocessor. All but `out` have an entry for each stage."""

    a: Any
    b: Any
    of_a: Any
    of_b: Any  # None for scales of 128x128 blocks
    out: Any
    full: Any  # the copies to a stage have ended, but for the second wave's rows
    late: Any  # the copy of the second wave's rows has ended; None with one wave
    empty: Any  # both warpgroups have read a stage


def gemm(a: jax.Array, b: jax.Array, of_a: jax.Array, of_b: jax.Array, out_dtype: Any) -> jax.Array:
    """The GEMM. Sums are float32; Hopper adds the 128 products of a block of k in about 14 bits.

    Args:
        a, b: (batch, m, k) and (batch, n, k) in FP8; m, n and k are multiples of 128.
        of_a: scales (batch, m, k / 128).
        of_b: scales (batch, n, k / 128) or (batch, n / 128, k / 128).
        out_dtype: float32, bfloat16 or float16.

    Returns:
        (batch, m, n)
    """
    (batch, m, k), n = a.shape, b.shape[1]
    tiles = Tiles(batch, m, n, k, is_vector=of_b.shape[1] == n)
    a, b, of_a, of_b = (x.reshape(-1, x.shape[-1]) for x in (a, b, of_a, of_b))
    grid = min(CORES, tiles.total)
    call = plgpu.kernel(
        functools.partial(_kernel, tiles, grid),
        out_type=jax.ShapeDtypeStruct((batch * m, n), out_dtype),
        grid=(grid,),
        grid_names=("core",),
        num_threads=MULTIPLYING + 1,
        thread_name="warpgroup",
        kernel_name="block_gemm",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # The kernel has all barriers that it needs. With one wave, Mosaic's were faster on an H100.
            unsafe_no_auto_barriers=tiles.waves > 1,
        ),
        interpret=INTERPRET,
    )
    # The scales of a block of k are contiguous, for TMA.
    return call(a, b, of_a.T, of_b.T if tiles.is_vector else of_b).reshape(batch, m, n)


def _int(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def _kernel(tiles: Tiles, grid: int, *refs: Any) -> None:
    """One multiprocessor's tiles."""
    a, b, _, _, out = refs
    scales = functools.partial(plgpu.SMEM, dtype=jnp.float32)
    columns = 128 // out.dtype.itemsize  # of 128 bytes, written at once
    shared = _Shared(
        a=plgpu.SMEM((STAGES, tiles.rows, BLOCK), a.dtype, transforms=_OPERAND),
        b=plgpu.SMEM((STAGES, BLOCK, BLOCK), b.dtype, transforms=_OPERAND),
        of_a=scales((STAGES, tiles.rows)),
        of_b=scales((STAGES, BLOCK)) if tiles.is_vector else None,
        out=plgpu.SMEM(
            (MULTIPLYING, ROWS, columns),
            out.dtype,
            transforms=(plgpu.TilingTransform((8, columns)), _SWIZZLE),
        ),
        full=plgpu.Barrier(num_arrivals=3 + tiles.is_vector, num_barriers=STAGES),
        late=plgpu.Barrier(num_barriers=STAGES) if tiles.waves > 1 else None,
        empty=plgpu.Barrier(num_arrivals=MULTIPLYING, num_barriers=STAGES),
    )

    def run(*parts: Any) -> None:
        warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
        own = lax.div(_int(tiles.total + grid - 1) - core, _int(grid))

        @pl.when(warpgroup == MULTIPLYING)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _copy(tiles, own, lambda i: tiles.place(core + i * grid), refs, _Shared(*parts))

        @pl.when(warpgroup < MULTIPLYING)
        def _() -> None:
            plgpu.set_max_registers(240, action="increase")
            _multiply(tiles, own, lambda i: tiles.place(core + i * grid), refs, _Shared(*parts), warpgroup)

    pl.run_scoped(run, *shared, collective_axes="warpgroup")


def _copy(tiles: Tiles, own: Any, place: Any, refs: Any, shared: _Shared) -> None:
    """Copies the operands and scales of all tiles to shared memory, as soon as a stage is empty."""
    a, b, of_a, of_b, _ = refs

    def step(i: Any, j: Any) -> None:
        row, row_of_b, _ = place(i)
        number = i * tiles.steps + j
        stage = lax.rem(number, _int(STAGES))

        @pl.when(number >= STAGES)
        def _() -> None:
            plgpu.barrier_wait(shared.empty.at[stage])

        def copy(of: Any, to: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(of, to, barrier.at[stage])

        depth, columns = pl.ds(j * BLOCK, BLOCK), pl.ds(row_of_b, BLOCK)
        copy(of_a.at[j, pl.ds(row, tiles.rows)], shared.of_a.at[stage], shared.full)
        if tiles.is_vector:
            copy(of_b.at[j, columns], shared.of_b.at[stage], shared.full)
        first, second = pl.ds(0, WAVE), pl.ds(WAVE, WAVE)
        copy(a.at[pl.ds(row, WAVE), depth], shared.a.at[stage, first], shared.full)
        copy(b.at[columns, depth], shared.b.at[stage], shared.full)
        if tiles.waves > 1:
            copy(a.at[pl.ds(row + WAVE, WAVE), depth], shared.a.at[stage, second], shared.late)

    def tile(i: Any, _: Any) -> None:
        lax.fori_loop(0, tiles.steps, lambda j, _: step(i, j), None)

    lax.fori_loop(0, own, tile, None)
    _drain(own * tiles.steps, shared)


def _drain(total: Any, shared: _Shared) -> None:
    """Waits until the last stages are empty: JAX 0.11's interpreter refuses arrivals without a wait."""

    def wait(number: Any, _: Any) -> None:
        plgpu.barrier_wait(shared.empty.at[lax.rem(number, _int(STAGES))])

    lax.fori_loop(lax.max(total - STAGES, _int(0)), total, wait, None)


def _multiply(tiles: Tiles, own: Any, place: Any, refs: Any, shared: _Shared, warpgroup: Any) -> None:
    """The GEMMs of a warpgroup: its rows of each wave of each tile."""
    out = refs[-1]

    def tile(i: Any, _: Any) -> None:
        row, row_of_b, column = place(i)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), jnp.float32), plgpu.Layout.WGMMA)
        step = functools.partial(_step, tiles, refs[3], shared, i * tiles.steps, warpgroup, row_of_b)
        sums = lax.fori_loop(0, tiles.steps, step, (zeros,) * tiles.waves)
        for wave, each in enumerate(sums):
            rows = pl.ds(row + wave * WAVE + warpgroup * ROWS, ROWS)
            _write(each, lambda columns, rows=rows: out.at[rows, columns], column, shared.out.at[warpgroup])

    lax.fori_loop(0, own, tile, None)
    plgpu.wait_smem_to_gmem(0)


def _step(
    tiles: Tiles, of_b: Any, shared: _Shared, start: Any, warpgroup: Any, row_of_b: Any, j: Any, sums: Any
) -> Any:
    """Adds the GEMMs of block `j` of k to the sums of each wave."""
    stage = lax.rem(start + j, _int(STAGES))
    plgpu.barrier_wait(shared.full.at[stage])
    rows = [pl.ds(wave * WAVE + warpgroup * ROWS, ROWS) for wave in range(tiles.waves)]
    of_rows = [_vector(shared.of_a.at[stage, each], 1) for each in rows]
    if tiles.is_vector:
        of_columns = _vector(shared.of_b.at[stage], 0)
    else:
        of_block = of_b[lax.div(_int(row_of_b), _int(BLOCK)), j]
        of_rows, of_columns = [each * of_block for each in of_rows], None
    added = []
    for wave, of_row in enumerate(of_rows):
        if wave:
            # Without a barrier here, ptxas starts both GEMMs first, and lacks registers for two accumulators.
            plgpu.barrier_wait(shared.late.at[stage])
        part = _gemm(shared.a.at[stage, rows[wave]], shared.b.at[stage])
        if wave == tiles.waves - 1:
            plgpu.barrier_arrive(shared.empty.at[stage])
        if of_columns is not None:
            part = part * lax.broadcast_in_dim(of_columns, part.shape, [1])
        added.append(sums[wave] + part * lax.broadcast_in_dim(of_row, part.shape, [0]))
    return tuple(added)


def _vector(ref: Any, reduced: int) -> Any:
    """A vector in the layout that an accumulator of wgmma has without the axis `reduced`."""
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(reduced))


def _gemm(a: Any, b: Any) -> Any:
    """The GEMM of two arrays in shared memory."""

    def run(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, a, b.T)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, BLOCK), jnp.float32))  # pyright: ignore


def _write(sums: Any, rows: Callable[[Any], Any], column: Any, shared: Any) -> None:
    """Writes sums by way of shared memory to the output; `rows(columns)` is a part of it."""
    size = shared.shape[1]
    for start in range(0, BLOCK, size):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared[...] = sums[:, start : start + size].astype(shared.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, rows(pl.ds(column + start, size)))
