"""`Scaling`, the interface of scaling methods: how the operands of a dot are quantized for its GEMMs.

A dot has three operands, and each takes part in two of its three GEMMs:

| operand | first GEMM | second GEMM |
|---|---|---|
| 0, lhs (m, k) | fprop, along k | wgrad, along m |
| 1, rhs (k, n) | fprop, along k | dgrad, along n |
| 2, grad (m, n) | dgrad, along n | wgrad, along m |

The lhs of a ragged dot has rows that are sorted by group, and group sizes of shape=(groups,). `starts_of`,
`groups_of_rows` and `in_aligned_groups` find the rows of a group.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8jax.formats import Format
from fp8jax.quantization import BlockMethod, ScaledArray

LHS, RHS, GRAD = 0, 1, 2
OPERANDS = ("lhs", "rhs", "grad")

# Named scopes of the casts of lhs, rhs and the output gradient.
CASTS = ("cast_lhs", "cast_rhs", "cast_grad")

# An entry `KEY` is a seed, see `fp8jax.scaling.seeds`; other entries have any names.
State = dict[str, Float[Array, "..."]]
KEY = "key"

# For which of its GEMMs an operand is needed.
Uses = tuple[bool, bool]


class KernelMatrix(NamedTuple):
    """A kernel as the matrix of its GEMMs, whole or as this device's shard of it."""

    side: Any  # a `fp8jax.dot.layout.Side`
    sharding: Any  # a `fp8jax.dot.weight.KernelSharding`

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the whole matrix, ([batch,] k, n)."""
        return self.side.matrix

    @property
    def is_as_stored(self) -> bool:
        """Whether the stored kernel is whole and its matrix is a reshape of it."""
        order = tuple(range(len(self.side.shape)))
        return len(self.matrix) == 2 and self.side.order == order and not self.sharding.is_part

    def to_matrix(self, x: Any) -> Any:
        """The whole kernel, an array or a `ScaledArray` with one scale, as a matrix."""
        return self.side.to_matrix(x)

    def gathered(self, part: Any) -> Any:
        """The whole kernel, all-gathered in the format of the shard."""
        return self.sharding.gathered(part)

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """The amax of the whole kernel; `amax` is the amax of this device's shard."""
        return self.sharding.common_amax(amax)

    def shard(self) -> Any:
        """This device's shard of the matrix, a `fp8jax.dot.layout.MatrixShard`; None for a whole kernel."""
        if not self.sharding.is_part:
            return None
        return self.side.shard(self.sharding.axis, self.sharding.devices)

    def gathered_runs(self, parts: list[jax.Array], axis: int, runs: int) -> list[jax.Array]:
        """All-gathers arrays along a negative axis that consists of sharded runs."""
        return self.sharding.gathered_runs(parts, axis, runs)


class QuantizedRows(NamedTuple):
    """Rows sorted by group, quantized for their two GEMMs."""

    first: Any
    second: Any
    seen: jax.Array  # what `Scaling.update` needs of each group, shape=(groups, ...)
    sizes: Any  # of the groups in the quantized rows, shape=(groups,); None for one matrix


class Scaling(abc.ABC):
    """A scaling method with the options of a recipe, a frozen value.

        state = scaling.init()
        (for_fprop, for_wgrad), seen_lhs = scaling.quantize(state, LHS, lhs, (True, True))
        residual, seen_rhs = scaling.prepare(state, rhs, kernel, 0)
        for_fprop = scaling.kernel(state, residual, kernel, 0)
        state = scaling.update(state, jnp.stack([seen_lhs, seen_rhs, seen_grad]))

    Codes are bytes in all results, see `quantization.as_bytes`. A class without one of the abstract methods
    cannot be instantiated.
    """

    # The letters of an operand's axes in its two GEMMs, for each operand.
    axes: ClassVar[tuple[tuple[str, str], ...]]
    # Whether the residual of a kernel is its codes; otherwise it is the kernel as it is stored.
    is_residual_quantized: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        """Raises TypeError for a class without the attributes."""
        for name in ("axes", "is_residual_quantized"):
            if not hasattr(cls, name):
                raise TypeError(f"{cls.__name__}: expected the attribute `{name}` of `Scaling`; got none.")

    @property
    @abc.abstractmethod
    def granularity(self) -> str:
        """The part of an operand that has a scale: "tensor", or a block of rows and columns as "1x128"."""

    @property
    def scales(self) -> str:
        """The parts of all operands that have a scale, and the scale's format, as the chart says them."""
        return self.granularity

    @property
    @abc.abstractmethod
    def rows_multiple(self) -> int | None:
        """Rows of a group are padded to a multiple of this number; None if each GEMM quantizes its rows."""

    @property
    def note(self) -> str:
        """A line for reports; "" without one."""
        return ""

    @property
    def kernel_method(self) -> BlockMethod | None:
        """The arguments of `quantize_blocks` for a kernel in its first GEMM; None for other scalings."""
        return None

    @property
    def takes_computed(self) -> bool:
        """Whether `quantize` takes a `Computed`, which its kernel computes on a GPU."""
        return False

    @abc.abstractmethod
    def init(self) -> State:
        """The first state of a dot."""

    @abc.abstractmethod
    def format(self, operand: int) -> Format:
        """The format of an operand's codes."""

    @abc.abstractmethod
    def quantize(self, state: State, operand: int, x: Array, uses: Uses) -> tuple[tuple[Any, Any], Array]:
        """An activation or an output gradient, as a matrix, for its two GEMMs; and what `update` needs of it.

        An operand that is not used is None.
        """

    @abc.abstractmethod
    def quantize_rows(self, state: State, operand: int, x: Array, sizes: Array, uses: Uses) -> QuantizedRows:
        """`quantize` for rows sorted by group, with a state for each group."""

    @abc.abstractmethod
    def prepare(self, state: State, rhs: Any, kernel: KernelMatrix, groups: int) -> tuple[Any, Array]:
        """The residual of a kernel, and what `update` needs of it.

        Args:
            state: the dot's state, of each group if there are `groups`.
            rhs: the kernel as it is stored, or this device's shard of it.
            kernel: its matrix.
            groups: number of stacked kernels; 0 for one kernel.
        """

    @abc.abstractmethod
    def kernel(self, state: State, residual: Any, kernel: KernelMatrix, use: int) -> ScaledArray:
        """The whole kernel for its first GEMM (0) or its second one (1)."""

    def stored(self, x: Array, layers: tuple[int, ...], inputs: int) -> ScaledArray | None:
        """A frozen kernel, to be stored as the operand of its first GEMM; None if another format serves.

        Args:
            x: the kernel, or a stack of kernels, shape=(*layers, *shape), with the contracted axes first.
            layers: leading axes of stacked layers.
            inputs: the product of the contracted axes.
        """
        del x, layers, inputs
        return None

    @abc.abstractmethod
    def update(self, state: State, seen: Float[Array, "operands ..."]) -> State:
        """The arrays of the next state that change."""


class ScaleMethod(NamedTuple):
    """A way to compute the scale of a tensor: three pure functions over a dict of arrays, as in optax.

        state = method.init(n)                       # for the n operands of a dot
        scale = method.scale(state, i, amax, max)    # for the cast of operand i, this step
        state = method.update(state, amaxes, maxes)  # for the next step

    `amax` is the amax of operand i, shape (); `max` is the max of its format. `update` takes all operands at
    once, shape (n,), because on a GPU n scalars cost as much as one.
    """

    init: Callable[[int], State]
    scale: Callable[[State, int, Float[Array, ""], float], Float[Array, ""]]
    update: Callable[[State, Float[Array, " n"], Float[Array, " n"]], State]


# Rows sorted by group ############################################################################


def starts_of(sizes: jax.Array) -> jax.Array:
    """The first row of each group."""
    return jnp.cumsum(sizes) - sizes


def groups_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row, int32; the number of groups for rows past the last group's end."""
    row = jnp.arange(rows, dtype=sizes.dtype)
    return jnp.sum(jnp.cumsum(sizes)[:, None] <= row[None], axis=0, dtype=jnp.int32)


def in_aligned_groups(rows: jax.Array, sizes: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The rows with zeros after each group, up to a multiple of `size`; and the sizes of these groups."""
    aligned = -(-sizes // size) * size
    total = -(-(rows.shape[0] + sizes.shape[0] * (size - 1)) // size) * size
    number = groups_of_rows(aligned, total)
    group = jnp.minimum(number, sizes.shape[0] - 1)
    within = jnp.arange(total, dtype=sizes.dtype) - starts_of(aligned)[group]
    is_own = (number < sizes.shape[0]) & (within < sizes[group])
    some = rows if rows.shape[0] else jnp.zeros((1, *rows.shape[1:]), rows.dtype)
    taken = jnp.take(some, starts_of(sizes)[group] + within, axis=0, mode="clip")
    return jnp.where(is_own[:, None], taken, jnp.zeros((), rows.dtype)), aligned
