"""Grouped matmul as a scan of equal-sized GEMMs: each group of rows times its own matrix.

Rows are sorted by group. The scan takes a fixed-size block of rows from one group and multiplies it by the
group's matrix:

    rows       0 0 0 0 0 1 1 2 2 2 2 2 2        of groups 0, 1, 2
    blocks    |0 0 0 0|
                      |0 1 1 2|                 the last block of a group reads past the group's end;
                        |1 1 2 2|               the next block overwrites the extra rows
                            |2 2 2 2|
                                    |2 2 . .|

The number of blocks depends on the group sizes at run time, but rows / size + groups is an upper bound, so no
row is dropped. With blocks of a quarter of the mean group, a fifth of the work is padding. XLA has no FP8
grouped matmul, and except on TPU its `jax.lax.ragged_dot` multiplies every row by every group's matrix.

References:
    MegaBlocks, arXiv 2211.15841, section 4 (dropless mixture of experts by block-sparse matmul).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8jax.quantization import ScaledArray, is_scaled, on_data
from fp8jax.scaling.base import groups_of_rows, starts_of

# Rows per block: FP8 GEMMs need multiples of 16, and blocks of more than 2048 rows are not faster.
_SMALLEST, _LARGEST = 16, 2048


class RowTiles(NamedTuple):
    """The group and the rows of each block."""

    group: jax.Array  # shape=(blocks,), int32
    start: jax.Array  # shape=(blocks,), int32: the first row; the number of rows for an unused block
    own: jax.Array  # shape=(blocks,), int32: the group's rows from `start` on; 0 for an unused block


class ExpertSharding(NamedTuple):
    """The mesh axis that shards the groups (experts)."""

    mesh: Mesh
    axis_name: str


# Rows, shape=(rows, n), or a matrix per group, shape=(groups, k, n): floats, or codes as bytes with a float32
# scale of each group, shape=(groups,), or with scales of blocks, whose first axis is the codes'.
Operand = jax.Array | ScaledArray

# A GEMM of two matrices: floats, or codes as bytes with a scalar scale.
Multiply = Callable[[Any, Any], jax.Array]


def on_each(function: Callable[..., Any], over: ExpertSharding | None) -> Callable[..., Any]:
    """`function` on each device that has experts, inside another `jax.shard_map` or outside. All inputs and
    outputs, trees of arrays, are sharded along their first axis."""
    if over is None:
        return function
    spec, here = P(over.axis_name), jax.sharding.get_abstract_mesh()
    mesh: Any = over.mesh if here.empty else here
    options = {"axis_names": {over.axis_name}, "check_vma": False}
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def size_of_block(rows: int, groups: int, parts: int) -> int:
    """Rows per block: the mean group size / `parts`, rounded down to a power of two, between 16 and 2048."""
    wanted = max(rows // (parts * max(groups, 1)), 1)
    return min(max(2 ** (wanted.bit_length() - 1), _SMALLEST), _LARGEST)


def row_tiles(sizes: jax.Array, rows: int, size: int) -> RowTiles:
    """The blocks of `size` rows each, for group sizes of shape=(groups,) and `rows` rows in all."""
    groups = sizes.shape[0]
    needed = -(-sizes // size)
    last, ends = jnp.cumsum(needed), jnp.cumsum(sizes)
    count = rows // size + min(groups, rows)
    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(groups_of_rows(needed, count), groups - 1)
    within = number - (last - needed)[group]
    is_used = number < last[-1]
    start = jnp.where(is_used, (ends - sizes)[group] + within * size, rows)
    own = jnp.where(is_used, ends[group] - start, 0)
    return RowTiles(*(x.astype(jnp.int32) for x in (group, start, own)))


def rows_times_matrices(
    rows: Operand,
    matrices: Operand,
    sizes: jax.Array,
    multiply: Multiply,
    shape: Any,
    *,
    is_separate: bool = False,
    aligned: jax.Array | None = None,
    least: int = 1,
) -> jax.Array:
    """Each row times its group's matrix; 0 for rows past the last group.

    Args:
        rows: shape=(rows, ...).
        matrices: shape=(groups, ...).
        sizes: sizes of consecutive groups of rows, shape=(groups,), integers.
        multiply: the GEMM of a block and a matrix.
        shape: `jax.ShapeDtypeStruct` of the output, (rows, n).
        is_separate: whether rows of other groups in a block are zeroed, for a GEMM with a scale for all rows.
        aligned: the sizes of the groups in `rows` if they are `in_aligned_groups`; `least` is a multiple.
        least: rows of a block at least, a power of two.
    """
    count = shape.shape[0]
    size = max(size_of_block(count, sizes.shape[0], 4), least)
    padded, blocks = _padded(rows, size), row_tiles(sizes, count, size)
    shifts = jnp.zeros_like(sizes) if aligned is None else starts_of(aligned) - starts_of(sizes)

    def one(out: jax.Array, block: RowTiles) -> tuple[jax.Array, None]:
        take = _own_rows if is_separate else _rows
        read = block._replace(start=block.start + shifts[block.group].astype(jnp.int32))
        product = multiply(take(padded, read, size), _matrix(matrices, block.group))
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), block.start, 0), None

    empty = _zeros((count + size, *shape.shape[1:]), shape.dtype, rows)
    out, _ = lax.scan(one, empty, blocks)
    is_of_group = jnp.arange(count)[:, None] < jnp.sum(sizes)
    return jnp.where(is_of_group, out[:count], jnp.zeros((), shape.dtype))


def rows_times_rows(
    lhs: Operand, rhs: Operand, sizes: jax.Array, multiply: Multiply, shape: tuple[int, ...]
) -> jax.Array:
    """For each group, lhs^T rhs over the group's rows; float32 of `shape`, (groups, k, n).

    Args: see `rows_times_matrices`; `multiply` contracts the rows of two blocks.
    """
    count = lhs.shape[0]
    # Larger blocks than above, because each GEMM reads and writes a whole float32 matrix.
    size = size_of_block(count, sizes.shape[0], 2)
    operands = [_padded(rows, size) for rows in (lhs, rhs)]

    def one(sums: jax.Array, block: RowTiles) -> tuple[jax.Array, None]:
        # Other groups' rows are zeroed in both operands, because NaN * 0 is NaN.
        own = [_own_rows(rows, block, size) for rows in operands]
        return sums.at[block.group].add(multiply(*own)), None

    sums, _ = lax.scan(one, _zeros(shape, jnp.float32, lhs), row_tiles(sizes, count, size))
    return sums


def columns_times_columns(
    lhs: ScaledArray, rhs: ScaledArray, aligned: jax.Array, multiply: Multiply, shape: tuple[int, ...]
) -> jax.Array:
    """As `rows_times_rows`, of transposed operands in scale blocks along the rows of aligned groups.

    Args:
        lhs, rhs: codes as bytes, shape=(k or n, rows), and scales of shape (k or n, rows / block).
        aligned: the sizes of the groups, multiples of the block.
        multiply, shape: see `rows_times_rows`; k and n may be padded.
    """
    count, block_size = lhs.shape[1], lhs.shape[1] // lhs.bits.shape[1]
    size = max(size_of_block(count, aligned.shape[0], 2), block_size)
    leaves, treedef = jax.tree.flatten((lhs, rhs))
    parts = [size // (count // leaf.shape[1]) for leaf in leaves]
    padded = [jnp.pad(leaf, ((0, 0), (0, n))) for leaf, n in zip(leaves, parts, strict=True)]

    def own(leaf: jax.Array, n: int, block: RowTiles) -> jax.Array:
        taken = lax.dynamic_slice_in_dim(leaf, block.start // (size // n), n, axis=1)
        # Codes and scales, which may be NaN, of other groups are zeroed.
        is_own = jnp.arange(n)[None] < block.own // (size // n)
        return jnp.where(is_own, taken, jnp.zeros_like(taken))

    def one(sums: jax.Array, block: RowTiles) -> tuple[jax.Array, None]:
        operands = [own(leaf, n, block) for leaf, n in zip(padded, parts, strict=True)]
        product = multiply(*treedef.unflatten(operands))
        return sums.at[block.group].add(product[: shape[1], : shape[2]]), None

    sums, _ = lax.scan(one, _zeros(shape, jnp.float32, lhs), row_tiles(aligned, count, size))
    return sums


def _zeros(shape: tuple[int, ...], dtype: Any, like: Operand) -> jax.Array:
    """Zeros that vary over the mesh axes of a `jax.shard_map` as `like` does."""
    return lax.full_like(jax.tree.leaves(like)[0], 0, dtype, shape)


def _has_blocks(x: Operand) -> bool:
    """Whether each leaf has the codes' first axis."""
    return isinstance(x, ScaledArray) and x.scale.ndim > 1


def _padded(rows: Operand, size: int) -> Operand:
    """The rows, followed by one block of zeros."""
    pad = lambda x: jnp.pad(x, ((0, size), (0, 0)))  # noqa: E731
    return jax.tree.map(pad, rows) if _has_blocks(rows) else on_data(pad, rows)


def _rows(rows: Operand, block: RowTiles, size: int) -> Operand:
    return _part(rows, lambda x: lax.dynamic_slice_in_dim(x, block.start, size), block.group)


def _own_rows(rows: Operand, block: RowTiles, size: int) -> Operand:
    """The rows of a block, zeros for those of other groups."""
    is_own = jnp.arange(size)[:, None] < block.own
    return on_data(lambda x: jnp.where(is_own, x, jnp.zeros_like(x)), _rows(rows, block, size))


def _matrix(matrices: Operand, group: Any) -> Operand:
    return _part(matrices, lambda x: lax.dynamic_index_in_dim(x, group, keepdims=False), group)


def _part(x: Any, take: Callable[[jax.Array], jax.Array], group: Any) -> Operand:
    """A part of the data, with the group's scale or the scales of its blocks."""
    if _has_blocks(x):
        return jax.tree.map(take, x)
    return ScaledArray(take(x.data), x.scale[group]) if is_scaled(x) else take(x)
