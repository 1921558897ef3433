"""A matrix in NVFP4 for two GEMMs: as it is, and transposed, with the methods of NVIDIA's recipe.

    first, second = quantize_rows_and_columns_fp4(x, key, NVFP4_1X16, (False, True), seeds, transform=True)

On a GPU two Pallas kernels read the matrix once each: the first one for the scales of the tensors, the second
one for all codes. Each has the 16 rows of a block as 16 arrays, so that the Hadamard transform of columns
is sums and differences of arrays. XLA would store the transformed matrix and its scaled copies.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, UInt32

from fp8jax.formats import E4M3
from fp8jax.platforms import by_platform
from fp8jax.quantization.array import ScaledArray
from fp8jax.quantization.blocks import (
    SIGNS,
    BlockMethod,
    dtype_of_hadamard,
    hadamard,
    quantize_blocks,
)
from fp8jax.quantization.fp4 import of_blocks, of_tensor
from fp8jax.quantization.kernels.partition import split_by_devices
from fp8jax.quantization.kernels.tiles import (
    PARAMS,
    TILE,
    bits_of,
    divide_of,
    largest_bits,
    packed,
    rows_of,
    triton,
)
from fp8jax.quantization.packed import PackedE2M1, codes_of
from fp8jax.quantization.quantize import amax, amax_from_bits
from fp8jax.quantization.rounding import bits_at, random_bits

BLOCK = 16
COUNT = TILE // BLOCK

# Whether the kernels are interpreted, to test them on a CPU.
INTERPRET = False

Seeds = Callable[[Float32[Array, "2"], Float32[Array, ""]], UInt32[Array, "2"]]


def quantize_rows_and_columns_fp4(
    x: Float[Array, "*batch rows columns"],
    key: Float32[Array, "2"] | None,
    method: BlockMethod,
    transposes: tuple[bool, ...] = (False, True),
    *,
    transform: bool = False,
    seeds: Seeds,
    whole_amax: Float32[Array, "..."] | None = None,
) -> tuple[ScaledArray, ...]:
    """`quantize_blocks` of `x` and of its transpose.

    Args:
        x: float array.
        key: for stochastic rounding; None rounds to nearest even.
        method: `NVFP4_1X16` or `NVFP4_16X16`; with the rule "four_or_six" by XLA on every platform, since the
            kernels compute a scale from the amax of its block alone.
        transposes: the copies, False for one of `x` and True for one of its transpose.
        transform: whether the transpose goes through `hadamard` first. Its padding does, too.
        seeds: gives the seeds of the random bits of `x` and its transpose, from the key and the amax of `x`.
        whole_amax: see `quantize_blocks`; only without `transform`.
    """
    static = {"method": method, "transposes": transposes, "transform": transform, "seeds": seeds}
    if not x.size or method.rule != "six" or not triton:
        return _one_by_one(x, key, whole_amax, **static)
    return by_platform(x, key, whole_amax, cpu=_one_by_one, default=_at_once, is_deferred=False, **static)


def _one_by_one(
    x: jax.Array,
    key: Any,
    whole_amax: Any = None,
    *,
    method: BlockMethod,
    transposes: tuple[bool, ...],
    transform: bool,
    seeds: Any,
) -> tuple[ScaledArray, ...]:
    made = None if key is None else seeds(key, amax(x))
    copies = []
    for transpose in transposes:
        copy = jnp.swapaxes(x, -1, -2) if transpose else x
        pairs = zip(method.padded(copy.shape), copy.shape, strict=True)
        copy = jnp.pad(copy, [(0, padded - dim) for padded, dim in pairs])
        copy = hadamard(copy) if transpose and transform else copy
        random = None if made is None else random_bits(made[int(transpose)], copy.shape)
        copies.append(quantize_blocks(copy, method, random, whole_amax))
    return tuple(copies)


def _at_once(
    x: jax.Array,
    key: Any,
    whole_amax: Any = None,
    *,
    method: BlockMethod,
    transposes: tuple[bool, ...],
    transform: bool,
    seeds: Any,
) -> tuple[ScaledArray, ...]:
    *batch, rows, columns = x.shape
    tiles = x.reshape(-1, rows, columns)
    tiles = jnp.pad(tiles, [(0, 0), (0, -rows % TILE), (0, -columns % TILE)])
    shapes = tuple(
        method.padded((columns, rows) if transpose else (rows, columns)) for transpose in transposes
    )
    of_x, of_transpose = _amaxes(tiles, transform and any(transposes), whole_amax)
    scales = [of_tensor(of_transpose if transpose else of_x) for transpose in transposes]
    operands = [tiles, jnp.stack([part for pair in scales for part in pair], axis=1)]
    if key is not None:
        operands += _places(tiles.shape, seeds(key, jnp.max(of_x)))
    copies = ", ".join(
        place
        for transpose in transposes
        for place in (["b k m w", "b k m"] if transpose else ["b m k w", "b m k"])
    )
    rule = f"{', '.join(['b m k', 'b s', 'b r', 'b m', 'b k'][: len(operands)])} -> {copies}"
    quantize = functools.partial(_codes, method, transposes, transform, shapes)
    out = split_by_devices(quantize, rule, {"m": TILE, "k": TILE})(*operands)
    copies = []
    for (outer, inner), (_, decode), words, of_block in zip(shapes, scales, out[::2], out[1::2], strict=True):
        blocks = (outer // method.block[0], inner // BLOCK)
        words = words[:, :outer, : blocks[1]].reshape(*batch, outer, 2 * blocks[1])
        codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(*batch, outer, inner // 2)
        of_block = of_block[:, : blocks[0], : blocks[1]].reshape(*batch, *blocks)
        scale = ScaledArray(of_block, decode.reshape(*batch, 1, 1))
        copies.append(ScaledArray(PackedE2M1(codes), scale))
    return tuple(copies)


def _places(shape: tuple[int, ...], seeds: jax.Array) -> list[jax.Array]:
    """For each matrix its seeds and number, and the numbers of its rows and columns, which a shard needs."""
    count, m, k = shape
    number, row, column = (
        lax.broadcasted_iota(jnp.uint32, (count, n), i) for n, i in ((1, 0), (m, 1), (k, 1))
    )
    return [jnp.concatenate([jnp.broadcast_to(seeds, (count, 2)), number, number], axis=1), row, column]


def _amaxes(tiles: jax.Array, transform: bool, whole_amax: Any) -> tuple[jax.Array, jax.Array]:
    """The amaxes of each matrix and of its transpose, which may be transformed; shape (matrices,)."""
    if not transform:
        of_x = amax(tiles, (len(tiles), 1, 1)) if whole_amax is None else whole_amax
        return of_x.reshape(-1), of_x.reshape(-1)
    bits = split_by_devices(_bits_of_tiles, "b m k -> b m k, b m k", {"m": TILE, "k": TILE})(tiles)
    of_x, of_transpose = (amax_from_bits(jnp.max(each, axis=(1, 2))) for each in bits)
    return of_x, of_transpose


def _bits_of_tiles(x: jax.Array) -> tuple[jax.Array, ...]:
    """The kernel of `_largest`, for each tile."""
    grid = (x.shape[0], x.shape[1] // TILE, x.shape[2] // TILE)
    call = pl.pallas_call(
        _largest,
        grid=grid,
        in_specs=[pl.BlockSpec((None, TILE, TILE), lambda b, i, j: (b, i, j))],
        out_specs=[pl.BlockSpec((None, 1, 1), lambda b, i, j: (b, i, j))] * 2,
        out_shape=[jax.ShapeDtypeStruct(grid, jnp.int32)] * 2,
        compiler_params=PARAMS,
        interpret=INTERPRET,
    )
    return tuple(call(x))


def _codes(
    method: BlockMethod,
    transposes: tuple[bool, ...],
    transform: bool,
    shapes: tuple[Any, ...],
    *operands: jax.Array,
) -> tuple[jax.Array, ...]:
    """For each side its codes, eight in each number, and the scales of its blocks, of whole tiles."""
    (count, m, k), height = operands[0].shape, method.block[0]
    in_specs = [
        pl.BlockSpec((None, TILE, TILE), lambda b, i, j: (b, i, j)),
        pl.BlockSpec((None, 2 * len(transposes)), lambda b, i, j: (b, 0)),
        pl.BlockSpec((None, 4), lambda b, i, j: (b, 0)),
        pl.BlockSpec((None, TILE), lambda b, i, j: (b, i)),
        pl.BlockSpec((None, TILE), lambda b, i, j: (b, j)),
    ]
    out_specs, out_shape = [], []
    for transpose in transposes:
        outer, inner = (k, m) if transpose else (m, k)
        out_specs += [
            pl.BlockSpec(
                (None, TILE, COUNT, 2), lambda b, i, j, t=transpose: (b, j, i, 0) if t else (b, i, j, 0)
            ),
            pl.BlockSpec(
                (None, TILE // height, COUNT), lambda b, i, j, t=transpose: (b, j, i) if t else (b, i, j)
            ),
        ]
        out_shape += [
            jax.ShapeDtypeStruct((count, outer, inner // BLOCK, 2), jnp.uint32),
            jax.ShapeDtypeStruct((count, outer // height, inner // BLOCK), E4M3.dtype),
        ]
    call = pl.pallas_call(
        functools.partial(_tile, method, transposes, transform, shapes, len(operands) > 2),
        grid=(count, m // TILE, k // TILE),
        in_specs=in_specs[: len(operands)],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=PARAMS,
        interpret=INTERPRET,
        name="quantize_blocks",
    )
    return tuple(call(*operands))


def _largest(x: Any, of_x: Any, of_transpose: Any) -> None:
    """The bits of a tile's two amaxes; those of infinities and NaN are larger than any finite number's."""
    rows = rows_of(x, BLOCK)
    for out, each in ((of_x, rows), (of_transpose, _transformed(rows, x.dtype))):
        out[...] = jnp.max(largest_bits(each)).reshape(1, 1)


def _tile(
    method: BlockMethod,
    transposes: tuple[bool, ...],
    transform: bool,
    shapes: tuple[Any, ...],
    is_random: bool,
    x: Any,
    *refs: Any,
) -> None:
    """One tile of each copy."""
    scales, places, out = refs[0], refs[1:4] if is_random else None, refs[4 if is_random else 1 :]
    for n, (transpose, shape) in enumerate(zip(transposes, shapes, strict=True)):
        blocks = functools.partial(_blocks, method, scales[2 * n], scales[2 * n + 1])
        random = functools.partial(_random, places, transpose, shape) if is_random else lambda _: None
        if transpose:
            rows = _transformed(rows_of(x, BLOCK), x.dtype) if transform else rows_of(x, BLOCK)
            _write_transposed(rows, blocks, random, out[2 * n], out[2 * n + 1])
        else:
            _write(x[...].astype(jnp.float32), blocks, random, out[2 * n], out[2 * n + 1])


def _write(tile: jax.Array, blocks: Any, random: Any, words: Any, scales: Any) -> None:
    """The codes and scales of a tile as it is."""
    tile = tile.reshape(TILE, COUNT, BLOCK)
    factor, scales[...] = blocks(jnp.max(bits_of(tile), axis=2), 0)
    codes = codes_of(tile * factor[:, :, None], random(None)).reshape(TILE, COUNT, 2, 8)
    shifts = lax.broadcasted_iota(jnp.uint32, codes.shape, 3) * np.uint32(4)
    words[...] = jnp.sum(codes << shifts, axis=3, dtype=jnp.uint32)


def _write_transposed(rows: list[jax.Array], blocks: Any, random: Any, words: Any, scales: Any) -> None:
    """The codes and scales of a tile's transpose, from its rows."""
    factor, scale = blocks(largest_bits(rows), 1)
    scales[...] = scale.T
    codes = [codes_of(row * factor, random(r)) for r, row in enumerate(rows)]
    words[...] = packed(codes, 4).transpose(1, 0, 2)


def _blocks(method: BlockMethod, encode: Any, decode: Any, bits: jax.Array, axis: int) -> tuple[Any, Any]:
    """Factors in the shape of `bits`, and scales. Blocks of 16 rows or columns share them along this axis."""
    shape, is_square = bits.shape, method.block[0] > 1
    split = (*shape[:axis], COUNT, BLOCK, *shape[axis + 1 :])
    if is_square:
        bits = jnp.max(bits.reshape(split), axis=axis + 1)
    factor, scale = of_blocks(amax_from_bits(bits), encode, decode, method.format.max, divide_of(INTERPRET))
    if is_square:
        factor = jnp.broadcast_to(jnp.expand_dims(factor, axis + 1), split).reshape(shape)
    return factor, scale


def _random(places: Any, transpose: bool, shape: tuple[int, int], r: int | None) -> jax.Array:
    """The bits of `random_bits` for a tile in blocks, or for every 16th row from row `r` on.

    Args:
        places: what `_places` returns, for this tile.
        transpose: whether the copy, of shape `shape`, is the transpose.
        shape: of the copy.
        r: the first row.
    """
    of_matrix, rows, columns = places
    if r is None:
        row, column = rows[...][:, None, None], columns[...].reshape(1, COUNT, BLOCK)
    else:
        row, column = rows[pl.ds(r, COUNT, BLOCK)][:, None], columns[...][None]
    outer, inner = (column, row) if transpose else (row, column)
    outer += of_matrix[2] * np.uint32(shape[0])
    return bits_at(outer * np.uint32(shape[1]) + inner, of_matrix[int(transpose)])


def _transformed(rows: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """`hadamard` of each column of a block."""
    rows = [row * sign for row, sign in zip(rows, SIGNS, strict=True)]
    for width in (8, 4, 2, 1):
        for i in range(BLOCK):
            if i // width % 2 == 0:
                low, high = rows[i], rows[i + width]
                rows[i], rows[i + width] = low + high, low - high
    return [(row * np.float32(0.25)).astype(dtype_of_hadamard(dtype)).astype(jnp.float32) for row in rows]
