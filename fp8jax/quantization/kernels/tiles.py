"""Tiles of a matrix, which Pallas kernels quantize as they are and transposed, or compute by an expression.

A kernel has the rows of a tile as a list of arrays, the first one with the first row of each block. So blocks
of rows, which are blocks of the transpose, have scales and codes by operations of one array with another, and
only packed codes are transposed. A transpose of the tile would pass through shared memory in many steps.

    Computed(x, expression, inputs)      # the matrix x, which is expression.of(inputs) too

An expression is elementwise: a gelu, a gated product, or the last operations of an RMS norm, of arrays that
exist anyway. A kernel that computes the matrix does not read it, and XLA stores it only for other uses.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32, UInt, UInt32

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


# Expressions ######################################################################################

# How an input lies in the matrix: entry by entry, one number for each row, or one for each column.
ENTRIES, ROWS, COLUMNS = "m k", "m r", "c k"

# Operations in the dtype of their operands; others are in float32, and rounded to it.
_IN_ANY_DTYPE = (lax.add_p, lax.sub_p, lax.mul_p, lax.neg_p, lax.integer_pow_p, lax.square_p)


class Operation(NamedTuple):
    """One elementwise operation."""

    primitive: jex.Primitive  # `lax.convert_element_type_p` converts to `dtype`
    params: tuple[tuple[str, Any], ...]
    operands: tuple[int | float, ...]  # a float is a constant, an integer the number of a value
    dtype: Any  # of the result

    def of(self, operands: Sequence[Any], divide: Callable[..., Any]) -> Any:
        """The result, of arrays that broadcast and of constants."""
        if self.primitive is lax.convert_element_type_p:
            return operands[0].astype(self.dtype)
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in operands))
        dtype = self.dtype if self.primitive in _IN_ANY_DTYPE else jnp.float32
        operands = [jnp.broadcast_to(jnp.asarray(x, dtype), shape) for x in operands]
        bind = divide if self.primitive is lax.div_p else self.primitive.bind
        out = bind(*operands, **dict(self.params))
        if self.primitive in (lax.max_p, lax.min_p):  # Triton's give the other operand for a NaN
            x, y = operands
            out = jnp.where((x == x) & (y == y), out, x + y)
        return out.astype(self.dtype)


class Expression(NamedTuple):
    """A function of the entries of a matrix. Value n is input n, or the result of an earlier operation."""

    inputs: tuple[str, ...]  # `ENTRIES`, `ROWS` or `COLUMNS` each
    operations: tuple[Operation, ...]
    result: int  # the number of a value

    def of(self, inputs: Sequence[Any], divide: Callable[..., Any] = lax.div) -> Any:
        """The value, of inputs that broadcast."""
        values = [*inputs]
        for operation in self.operations:
            given = [values[x] if isinstance(x, int) else x for x in operation.operands]
            values.append(operation.of(given, divide))
        return values[self.result]


class Computed(NamedTuple):
    """A matrix, and how else it is computed."""

    matrix: Float[Array, "m k"]
    expression: Expression
    inputs: tuple[Float[Array, "..."], ...]  # (m, k), (m, 1) or (1, k), as the expression says


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


# Codes ############################################################################################


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
