"""Parts of the Pallas kernels that quantize a tile of a matrix as it is and transposed.

A kernel has the rows of a tile as a list of arrays, the first one with the first row of each block. So blocks
of rows, which are blocks of the transpose, have scales and codes by operations of one array with another, and
only packed codes are transposed. A transpose of the tile would pass through shared memory in many steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32, Int32, UInt, UInt32

from fp8jax.quantization.kernels.expression import COLUMNS, Expression

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated in JAX; without it XLA quantizes
    triton: Any = None

# Rows and columns of the tile that one program of a kernel reads.
TILE = 128

PARAMS = triton and triton.CompilerParams(num_warps=8, num_stages=1)


def rows_in_reach(shape: tuple[int, ...]) -> int:
    """The rows that an array of bytes must have, so that a kernel in Triton reaches all of this shape.

    Pallas counts entries in 32 bits, with a sign, unless the array has more than 2^32 bytes (offsets of
    pointers in `jax/_src/pallas/triton/lowering.py`, 0.10 to 0.12).
    """
    batch, rows, columns = shape
    return 2**32 // (batch * columns) + 1 if 2**31 < batch * rows * columns <= 2**32 else rows


def rows_of(x: Any, size: int) -> list[Float32[Array, "blocks columns"]]:
    """The rows of a tile: for each row of a block of `size` rows an array with this row of all blocks."""
    return [x[pl.ds(row, TILE // size, size), :].astype(jnp.float32) for row in range(size)]


@dataclasses.dataclass(frozen=True)
class ComputedTile:
    """A tile of a matrix that the kernel computes, read as the reference of a tile is."""

    expression: Expression
    inputs: tuple[Any, ...]  # references; arrays of `COLUMNS`, which are read once
    divide: Callable[..., Any]

    def __getitem__(self, at: Any) -> Float32[Array, "rows columns"]:
        """All rows for `...`, or those of a slice and all columns."""
        rows = slice(None) if at is ... else at[0]
        pairs = zip(self.expression.inputs, self.inputs, strict=True)
        inputs = [x if place == COLUMNS else x[rows, :] for place, x in pairs]
        count = rows.size if isinstance(rows, pl.Slice) else TILE
        return jnp.broadcast_to(self.expression.of(inputs, self.divide), (count, TILE))


def bits_of(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """The bits of magnitudes, which have their order; those of infinity and NaN are the largest."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def largest_bits(rows: list[Float32[Array, "..."]]) -> Int32[Array, "..."]:
    """The largest of `bits_of` in each place of the arrays."""
    return functools.reduce(jnp.maximum, map(bits_of, rows))


def packed(codes: list[UInt[Array, "*place"]], width: int) -> UInt32[Array, "*place words"]:
    """Codes of `width` bits in numbers of 32 bits, the first code in the lowest bits."""
    count, words = 32 // width, []
    for start in range(0, len(codes), count):
        group = enumerate(codes[start : start + count])
        words.append(functools.reduce(jnp.bitwise_or, [code << np.uint32(width * n) for n, code in group]))
    return _interleaved(words)


def _interleaved(words: list[jax.Array]) -> jax.Array:
    """The arrays along a new last axis. Triton joins two arrays, so even and odd ones are joined."""
    if len(words) == 1:
        return words[0][..., None]
    halves = [_interleaved(words[start::2])[..., None] for start in (0, 1)]
    return lax.concatenate(halves, halves[0].ndim - 1).reshape(*words[0].shape, len(words))


def divide_of(is_interpreted: bool) -> Callable[..., Any]:
    """The division of float32 arrays, rounded to nearest; Triton's own may be two units off."""
    return lax.div if is_interpreted else _divide


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    [out] = triton.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;", args=[x, y], constraints="=r,r,r", pack=1, result_shape_dtypes=[shape]
    )
    return out
