"""Elementwise expressions, which a kernel computes on its tiles.

    Computed(x, expression, inputs)      # the matrix x, which is expression.of(inputs) too

A gelu, a gated product and the last operations of an RMS norm are such expressions, of arrays that exist
anyway. A kernel that computes the matrix does not read it, and XLA does not store it if nothing else does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

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
