"""Conversion of a `dot_general` of any rank to a (batched) matmul: ([batch,] m, k) times ([batch,] k, n).

GEMM libraries take matrices with one contracted dim, one free dim and at most one batch dim. A `Layout`
transposes and reshapes operands to matrices, and gradients back to the operands' shapes.

An einsum of two operands is one `dot_general` and a transpose:

    >>> from fp8jax.dot.layout import is_single_dot
    >>> is_single_dot("bthd,hdm->btm"), is_single_dot("bt,tm->b")     # the second sums `m` away
    (True, False)
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.quantization import on_data


class Side(NamedTuple):
    """The shape of one operand, and the order of its dims in the matrix."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # dims: batch first, then rows, then columns
    matrix: tuple[int, ...]  # shape of the (batched) matrix

    def to_matrix(self, x: Any) -> Any:
        """The operand, an array or a `ScaledArray` with one scale, as a matrix."""
        return on_data(lambda data: data.transpose(self.order).reshape(self.matrix), x)

    def to_tensor(self, x: jax.Array) -> jax.Array:
        """A matrix in the operand's shape."""
        back = tuple(self.order.index(dim) for dim in range(len(self.order)))
        return x.reshape(tuple(self.shape[dim] for dim in self.order)).transpose(back)

    def shard(self, dim: int, count: int) -> "MatrixShard":
        """One of `count` shards along a dim that is larger than 1."""
        dim %= len(self.shape)
        before, after = (self.order[: self.order.index(dim)], self.order[self.order.index(dim) + 1 :])
        within = math.prod(self.shape[d] for d in after)
        # The matrix's axis that has this dim: the axes after it have no more entries than the dims after it.
        axis = next(i for i in range(len(self.matrix)) if math.prod(self.matrix[i + 1 :]) <= within)
        rows = self.shape[dim] // count * within // math.prod(self.matrix[axis + 1 :])
        shape = tuple(n // count if d == dim else n for d, n in enumerate(self.shape))
        matrix = tuple(n // count if i == axis else n for i, n in enumerate(self.matrix))
        runs = math.prod(self.shape[d] for d in before) // math.prod(self.matrix[:axis])
        return MatrixShard(Side(shape, self.order, matrix), axis - len(matrix), runs, rows)


class MatrixShard(NamedTuple):
    """One device's shard of an operand."""

    side: Side
    axis: int  # the sharded axis of the matrix, negative
    runs: int  # the axis consists of this many runs, each of which has shards of all devices
    length: int  # of a shard in a run


class Layout(NamedTuple):
    """The shapes and transposes that turn one `dot_general` into a matmul."""

    lhs: Side  # ([batch,] m, k)
    rhs: Side  # ([batch,] k, n)
    out_shape: tuple[int, ...]
    is_batched: bool

    @property
    def is_rows_of_lhs(self) -> bool:
        """Whether lhs's last dim is the contracted one, and all others are the rows of its matrix."""
        shape, order, matrix = self.lhs
        return not self.is_batched and order == (*range(len(shape)),) and matrix[-1] == shape[-1]

    @classmethod
    def of(
        cls,
        lhs: tuple[int, ...],
        rhs: tuple[int, ...],
        dimension_numbers: lax.DotDimensionNumbers,
    ) -> "Layout":
        """The layout of the dot of arrays with shapes `lhs` and `rhs`.

        Raises:
            ValueError: `dimension_numbers` do not fit the shapes.
        """
        (lhs_k, rhs_k), (lhs_batch, rhs_batch) = (tuple(map(tuple, pair)) for pair in dimension_numbers)
        _check_dims("lhs", lhs_k + lhs_batch, lhs)
        _check_dims("rhs", rhs_k + rhs_batch, rhs)
        _check_sizes("contracted", lhs_k, rhs_k, lhs, rhs)
        _check_sizes("batch", lhs_batch, rhs_batch, lhs, rhs)
        # Both operands must order the contracted dims alike; rhs's order saves a transpose of the kernel.
        paired = sorted(zip(rhs_k, lhs_k, strict=True))
        lhs_k, rhs_k = tuple(k for _, k in paired), tuple(k for k, _ in paired)
        lhs_m = tuple(d for d in range(len(lhs)) if d not in lhs_k + lhs_batch)
        rhs_n = tuple(d for d in range(len(rhs)) if d not in rhs_k + rhs_batch)

        def side(shape: tuple[int, ...], *groups: tuple[int, ...]) -> Side:
            sizes = tuple(math.prod(shape[d] for d in dims) for dims in groups)
            matrix = sizes if groups[0] else sizes[1:]
            return Side(tuple(shape), sum(groups, ()), matrix)

        out = [lhs[d] for d in lhs_batch + lhs_m] + [rhs[d] for d in rhs_n]
        return cls(
            side(lhs, lhs_batch, lhs_m, lhs_k),
            side(rhs, rhs_batch, rhs_k, rhs_n),
            tuple(out),
            bool(lhs_batch),
        )


def _check_dims(name: str, dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if len(set(dims)) < len(dims) or not set(dims) <= set(range(len(shape))):
        raise ValueError(
            f"`dimension_numbers`: expected different dims of `{name}`, from 0 to {len(shape) - 1} for shape "
            f"{tuple(shape)}; got {dims}."
        )


def _check_sizes(
    what: str,
    lhs_dims: tuple[int, ...],
    rhs_dims: tuple[int, ...],
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
) -> None:
    """Raises ValueError unless the dims agree in number and sizes."""
    if [lhs[d] for d in lhs_dims] != [rhs[d] for d in rhs_dims]:
        raise ValueError(
            f"expected {what} dims of equal number and sizes; got dims {lhs_dims} of `lhs`, shape "
            f"{tuple(lhs)}, and {rhs_dims} of `rhs`, shape {tuple(rhs)}."
        )


def contract(spec: str, is_batched: bool = False) -> lax.DotDimensionNumbers:
    """Dimension numbers of a matmul such as "mk,kn": the letter in both operands is contracted. Batch dims
    come first."""
    lhs, rhs = spec.split(",")
    (letter,) = set(lhs) & set(rhs)
    batch = (0,) if is_batched else ()
    offset = len(batch)
    return (((lhs.index(letter) + offset,), (rhs.index(letter) + offset,)), (batch, batch))


def is_single_dot(subscripts: str) -> bool:
    """Whether one `dot_general` and a transpose compute the einsum: `subscripts` has two operands and "->",
    no repeated letter in an operand, and no letter or "..." summed in one operand only."""
    operands, arrow, out = subscripts.partition("->")
    if not arrow or operands.count(",") != 1:
        return False
    is_kept = ("..." in operands) == ("..." in out)
    lhs, rhs = operands.replace("...", "").split(",")
    out = out.replace("...", "")
    is_repeated = any(len(set(term)) < len(term) for term in (lhs, rhs, out))
    alone = set(lhs) ^ set(rhs)
    return not is_repeated and alone <= set(out) <= set(lhs) | set(rhs) and is_kept


def einsum_by(
    subscripts: str, lhs: Any, rhs: Any, dot_general: Callable[..., Any], out_sharding: Any = None
) -> Any:
    """`jnp.einsum(subscripts, lhs, rhs)` by `dot_general(lhs, rhs, dimension_numbers)`.

    Args:
        subscripts: `is_single_dot(subscripts)` must hold; lhs may have "...", rhs may not.
        lhs, rhs: operands of `dot_general`; only their `ndim` is used here.
        dot_general: called once; with `out_sharding` if it is given.
        out_sharding: sharding of the output, a `PartitionSpec` or a sharding.

    Raises:
        ValueError: an operand has another rank than its subscripts.
    """
    left, right, out = _spell_out(subscripts, lhs.ndim)
    if (lhs.ndim, rhs.ndim) != (len(left), len(right)):
        raise ValueError(
            f"`subscripts`: expected operands of the ranks in {subscripts!r}; got `lhs` of rank {lhs.ndim} "
            f"and `rhs` of rank {rhs.ndim}."
        )
    shared = [letter for letter in left if letter in right]
    batch = [letter for letter in shared if letter in out]
    contracted = [letter for letter in shared if letter not in out]

    def axes(term: str, letters: list[str]) -> tuple[int, ...]:
        return tuple(term.index(letter) for letter in letters)

    dimension_numbers: lax.DotDimensionNumbers = (
        (axes(left, contracted), axes(right, contracted)),
        (axes(left, batch), axes(right, batch)),
    )
    made = "".join(batch) + "".join(c for term in (left, right) for c in term if c not in shared)
    order = [made.index(letter) for letter in out]
    if out_sharding is None:
        return dot_general(lhs, rhs, dimension_numbers).transpose(order)
    spec = getattr(out_sharding, "spec", out_sharding)
    of_letter = dict(itertools.zip_longest(out, spec))
    made_spec = PartitionSpec(*(of_letter[letter] for letter in made))
    if isinstance(out_sharding, NamedSharding):
        made_spec = NamedSharding(out_sharding.mesh, made_spec)
    return dot_general(lhs, rhs, dimension_numbers, out_sharding=made_spec).transpose(order)


def _spell_out(subscripts: str, lhs_ndim: int) -> tuple[str, str, str]:
    """The three terms, with "..." replaced by unused letters."""
    operands, _, out = subscripts.partition("->")
    left, right = operands.split(",")
    unused = (c for c in map(chr, range(ord("A"), 0x250)) if c.isalpha() and c not in subscripts)
    hidden = lhs_ndim - len(left.replace("...", "")) if "..." in left else 0
    letters = "".join(next(unused) for _ in range(hidden))
    return left.replace("...", letters), right, out.replace("...", letters)
