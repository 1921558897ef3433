"""A matrix quantized in blocks for two GEMMs: as it is, and transposed.

    # Of x and of x.T, each with blocks along its last axis.
    first, second = quantize_rows_and_columns(x, BLOCK_1X128)

On a GPU one Pallas kernel reads each tile of the matrix once and writes both copies. XLA would compute the
scales and the codes of each copy in kernels of their own, and read the matrix four times.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from fp8jax.formats import E8M0
from fp8jax.platforms import by_platform
from fp8jax.quantization.array import ScaledArray
from fp8jax.quantization.blocks import BlockMethod, factors, quantize_blocks
from fp8jax.quantization.kernels.partition import split_by_devices
from fp8jax.quantization.kernels.tiles import (
    COLUMNS,
    ENTRIES,
    PARAMS,
    ROWS,
    TILE,
    Computed,
    ComputedTile,
    bits_of,
    divide_of,
    largest_bits,
    packed,
    rows_in_reach,
    rows_of,
    triton,
)
from fp8jax.quantization.quantize import amax_from_bits

# Rows of a tile that are an array each in `_write_transposed`.
PART = 32

# Whether the kernel is interpreted, to test it on a CPU.
INTERPRET = False


def quantize_rows_and_columns(
    x: Float[Array, "*batch rows columns"] | Computed,
    method: BlockMethod,
    transposes: tuple[bool, ...] = (False, True),
) -> tuple[ScaledArray, ...]:
    """`quantize_blocks` of `x` and of its transpose, rounded to nearest.

    Args:
        x: float array; or a matrix that the kernel computes, if it has whole tiles.
        method: a method of FP8 codes, with blocks of one row or square ones.
        transposes: the copies, False for one of `x` and True for one of its transpose.
    """
    x, expression, inputs = x if isinstance(x, Computed) else (x, None, ())
    if not x.size:
        return _one_by_one(x, method=method, transposes=transposes)
    if x.shape[-2] % TILE or x.shape[-1] % TILE:
        expression, inputs = None, ()
    static = {"method": method, "transposes": transposes, "expression": expression}
    default = _at_once if triton else _one_by_one
    return by_platform(x, inputs, cpu=_one_by_one, default=default, is_deferred=False, **static)


def _one_by_one(
    x: jax.Array,
    inputs: Any = (),
    *,
    method: BlockMethod,
    transposes: tuple[bool, ...],
    expression: Any = None,
) -> tuple[ScaledArray, ...]:
    del inputs, expression
    # The barrier: XLA on a CPU folds the transpose of a constant, and then reads it in the wrong order.
    return tuple(
        quantize_blocks(lax.optimization_barrier(jnp.swapaxes(x, -1, -2)) if transpose else x, method)
        for transpose in transposes
    )


def _at_once(
    x: jax.Array,
    inputs: Any = (),
    *,
    method: BlockMethod,
    transposes: tuple[bool, ...],
    expression: Any = None,
) -> tuple[ScaledArray, ...]:
    *batch, rows, columns = x.shape
    if expression is None:
        tiles = x.reshape(-1, rows, columns)
        operands = [jnp.pad(tiles, [(0, 0), (0, -rows % TILE), (0, -columns % TILE)])]
    else:
        operands = [each[None] for each in inputs]
    places = expression.inputs if expression else (ENTRIES,)
    copies = ", ".join(place for transpose in transposes for place in ["b k m" if transpose else "b m k"] * 2)
    quantize = functools.partial(_tiles, method, transposes, expression)
    rule = f"{', '.join(f'b {place}' for place in places)} -> {copies}"
    out = split_by_devices(quantize, rule, {"m": TILE, "k": TILE})(*operands)
    shapes = [(*batch, columns, rows) if transpose else (*batch, rows, columns) for transpose in transposes]
    pairs = zip(out[::2], out[1::2], strict=True)
    return tuple(_cut(method, shape, *pair) for shape, pair in zip(shapes, pairs, strict=True))


# The part of an input that a program reads, by how it lies in the matrix.
_IN_SPECS = {
    ENTRIES: pl.BlockSpec((None, TILE, TILE), lambda b, i, j: (b, i, j)),
    ROWS: pl.BlockSpec((None, TILE, 1), lambda b, i, j: (b, i, 0)),
    COLUMNS: pl.BlockSpec((None, 1, TILE), lambda b, i, j: (b, 0, j)),
}


def _tiles(
    method: BlockMethod, transposes: tuple[bool, ...], expression: Any, *inputs: jax.Array
) -> tuple[jax.Array, ...]:
    """The kernel: codes and scales of each copy of whole tiles."""
    places = expression.inputs if expression else (ENTRIES,)
    count, m, k = inputs[places.index(ENTRIES)].shape
    grid = (count, m // TILE, k // TILE)
    height, width = (TILE // size for size in method.block)
    scale_dtype = jnp.uint8 if method.scale == "E8M0" else jnp.float32
    out_specs, out_shape = [], []
    for transpose in transposes:
        place = (lambda b, i, j: (b, j, i)) if transpose else (lambda b, i, j: (b, i, j))
        if transpose:  # four codes in each number
            of_codes = pl.BlockSpec((None, TILE, TILE // PART, PART // 4), lambda b, i, j: (b, j, i, 0))
            out_shape.append(jax.ShapeDtypeStruct((count, k, m // PART, PART // 4), jnp.uint32))
        else:
            of_codes = pl.BlockSpec((None, TILE, TILE), place)
            shape = (count, rows_in_reach((count, m, k)), k)
            out_shape.append(jax.ShapeDtypeStruct(shape, method.format.dtype))
        out_specs += [of_codes, pl.BlockSpec((None, height, width), place)]
        outer, inner = (k, m) if transpose else (m, k)
        scales = (count, outer // TILE * height, inner // TILE * width)
        out_shape.append(jax.ShapeDtypeStruct(scales, scale_dtype))
    out = pl.pallas_call(
        functools.partial(_tile, method, transposes, expression),
        grid=grid,
        in_specs=[_IN_SPECS[place] for place in places],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=PARAMS,
        interpret=INTERPRET,
        name="quantize_blocks",
    )(*inputs)
    codes = [
        _bytes_of(each, method) if transpose else each[:, :m]
        for transpose, each in zip(transposes, out[::2], strict=True)
    ]
    return tuple(each for pair in zip(codes, out[1::2], strict=True) for each in pair)


def _bytes_of(words: jax.Array, method: BlockMethod) -> jax.Array:
    """The codes in numbers of 32 bits."""
    codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:2], -1)
    return lax.bitcast_convert_type(codes, method.format.dtype)


def _tile(method: BlockMethod, transposes: tuple[bool, ...], expression: Any, *refs: Any) -> None:
    """One tile of each copy."""
    inputs, out = refs[: -2 * len(transposes)], refs[-2 * len(transposes) :]
    x = inputs[0]
    if expression:
        pairs = zip(expression.inputs, inputs, strict=True)
        parts = tuple(x[...] if place == COLUMNS else x for place, x in pairs)
        x = ComputedTile(expression, parts, divide_of(INTERPRET))
    for transpose, to_codes, to_scale in zip(transposes, out[::2], out[1::2], strict=True):
        write = _write_transposed if transpose else _write
        write(method, x, to_codes, to_scale)


def _write(method: BlockMethod, x: Any, to_codes: Any, to_scale: Any) -> None:
    """The codes and scales of a tile as it is."""
    tile = x[...].astype(jnp.float32)
    parts = tile.reshape(-1, method.block[1]) if method.block[0] == 1 else tile.reshape(1, -1)
    factor, stored = factors(
        amax_from_bits(jnp.max(bits_of(parts), axis=1)), method, divide=divide_of(INTERPRET)
    )
    to_codes[...] = (parts * factor[:, None]).reshape(TILE, TILE).astype(method.format.dtype)
    to_scale[...] = stored.reshape(to_scale.shape)


def _write_transposed(method: BlockMethod, x: Any, to_codes: Any, to_scale: Any) -> None:
    """The codes and scales of a tile's transpose."""
    rows = rows_of(x, PART)
    bits = largest_bits(rows)
    if method.block[1] > PART:
        bits = jnp.max(bits, axis=0, keepdims=True)
    if method.block[0] > 1:
        bits = jnp.max(bits, axis=1, keepdims=True)
    factor, stored = factors(amax_from_bits(bits), method, divide=divide_of(INTERPRET))
    to_scale[...] = stored.T
    codes = [(row * factor).astype(method.format.dtype) for row in rows]
    words = packed([lax.bitcast_convert_type(each, jnp.uint8).astype(jnp.uint32) for each in codes], 8)
    to_codes[...] = words.transpose(1, 0, 2)


def _cut(method: BlockMethod, shape: tuple[int, ...], codes: jax.Array, scale: jax.Array) -> ScaledArray:
    """The copy of shape `method.padded(shape)` from whole tiles."""
    *batch, rows, columns = method.padded(shape)
    blocks = (rows // method.block[0], columns // method.block[1])
    codes = codes[:, :rows, :columns].reshape(*batch, rows, columns)
    scale = scale[:, : blocks[0], : blocks[1]].reshape(*batch, *blocks)
    if method.scale == "E8M0":
        scale = lax.bitcast_convert_type(scale, E8M0.dtype)
    return ScaledArray(codes, scale)
