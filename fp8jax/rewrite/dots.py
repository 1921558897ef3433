"""One dot product of a jaxpr: the parameter that it takes, its matrices, and why it cannot run in FP8."""

import math
from typing import Any, NamedTuple

from jax import lax

from fp8jax.dot.ragged_wide import RAGGED
from fp8jax.rewrite.follow import Way

Site = tuple[int, ...]

# The dimension numbers of `lax.ragged_dot`.
_PLAIN_RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))

# Why a dot product of a closed-over matrix stays in high precision.
OF_CONSTANTS = "its kernel is a constant of the function: make it a parameter"

DOTS = ("dot_general", "ragged_dot_general", RAGGED)


class Lost(NamedTuple):
    """A value computed from parameters only."""

    path: tuple[str, ...]  # path of the first of these parameters
    reason: str
    loops: tuple[tuple[Site, int], ...]
    is_opaque: bool  # whether `evaluate` cannot replace dot products of this value, as inside a custom call


class Dot(NamedTuple):
    """One dot product of a jaxpr."""

    site: Site
    path: tuple[str, ...] | None  # path of its parameter; None if both operands are activations
    kernel: int  # which operand the parameter is, 0 or 1
    shape: tuple[int, ...]  # shape of the parameter in the dot product
    gemm: tuple[int, int, int]  # rows, inputs and outputs of its matrices
    flops: int  # in one call of the function
    scope: str  # named scopes of the equation, joined by "/"
    loops: tuple[tuple[Site, int], ...]  # the scans that slice the parameter
    is_computed: bool  # whether the operand is computed from the parameter
    groups: int  # number of groups of a ragged dot; 0 for other dots
    is_matrix: bool  # whether the stored parameter is a matrix (inputs, outputs)
    reason: str | None  # why it cannot run in FP8; None if it can

    @property
    def depth(self) -> int:
        """The number of leading layer axes of the parameter."""
        return len(self.loops)


class Activation:
    """A value that depends on an input other than parameters."""


ACTIVATION, ONE_HOT = Activation(), Activation()  # ONE_HOT is cast from booleans: a one-hot lookup

CONSTANT = object()  # a closed-over matrix, or a value computed from one


def is_parameter(x: Any) -> bool:
    """Whether a value is a parameter or computed from parameters only."""
    return isinstance(x, Way | Lost)


def as_lost(x: Way | Lost, reason: str, is_opaque: bool = False) -> Lost:
    """A parameter that cannot be followed any further, and why."""
    if isinstance(x, Lost):
        return Lost(x.path, reason if is_opaque else x.reason, x.loops, x.is_opaque or is_opaque)
    return Lost(x.path, reason, x.loops, is_opaque)


def dot_of(eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> Dot:
    """The dot product of an equation.

    Args:
        eqn: the equation.
        ins: what its operands are: a `Way`, a `Lost`, an `Activation`, `CONSTANT` or None.
        at: its site.
        scope: its named scopes.
        times: how often it runs in one call of the function.
    """
    numbers = _PLAIN_RAGGED if eqn.primitive.name == RAGGED else None
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
    dims = numbers.dot_dimension_numbers if numbers is not None else eqn.params["dimension_numbers"]
    (contracted, batched), shapes = dims, [tuple(x.aval.shape) for x in eqn.invars[:2]]
    free = [
        math.prod(n for axis, n in enumerate(shape) if axis not in (*contracted[side], *batched[side]))
        for side, shape in enumerate(shapes)
    ]
    k = math.prod(shapes[0][axis] for axis in contracted[0])
    flops = times * 2 * math.prod(eqn.outvars[0].aval.shape) * k
    kernels = [side for side in (0, 1) if is_parameter(ins[side])]
    kernel = kernels[0] if len(kernels) == 1 else 1
    groups = 0
    if numbers is not None:
        groups = eqn.invars[2].aval.shape[-1]
        free[1] //= max(groups, 1)
        if set(numbers.lhs_ragged_dimensions) <= set(contracted[0]):
            flops //= max(groups, 1)
    gemm = (free[1 - kernel], k, free[kernel])
    x = ins[kernel]
    path = x.path if is_parameter(x) else None
    reason = _why_not(eqn, ins, kernels, gemm, len(shapes[1 - kernel]), numbers)
    if reason is None and not contracted[0]:
        reason = "it sums over no axis"
    loops, is_computed = (x.loops, isinstance(x, Lost)) if is_parameter(x) else ((), False)
    # The contracted axes come first in storage, and there is no batch axis.
    is_matrix = isinstance(x, Way) and not (x.is_shared or groups or batched[kernel])
    is_matrix = is_matrix and {x.perm[axis] for axis in contracted[kernel]} == {
        *range(len(contracted[kernel]))
    }
    return Dot(
        at, path, kernel, shapes[kernel], gemm, flops, scope, loops, is_computed, groups, is_matrix, reason
    )


def _why_not(
    eqn: Any, ins: list[Any], kernels: list[int], gemm: tuple[int, int, int], rank: int, numbers: Any
) -> str | None:
    if not kernels:
        return OF_CONSTANTS if CONSTANT in ins else "both operands are activations"
    if len(kernels) == 2:
        return "both operands are parameters"
    [kernel] = kernels
    x = ins[kernel]
    if isinstance(x, Lost) and x.is_opaque:
        return x.reason
    if ins[1 - kernel] is ONE_HOT:
        return "it looks up rows of a table"
    if ins[1 - kernel] in (None, CONSTANT):
        return "it multiplies no input of the model"
    if rank == 1:
        return "it multiplies a single vector"
    if numbers is not None and (kernel != 1 or isinstance(x, Lost) or not _is_plain_ragged(numbers)):
        return "it is not the ragged dot of rows and a kernel for each group"
    return None


def _is_plain_ragged(numbers: Any) -> bool:
    """Whether these are the dimension numbers of `lax.ragged_dot`."""
    return _parts(numbers) == _parts(_PLAIN_RAGGED)


def _parts(numbers: Any) -> list[tuple[int, ...]]:
    parts = [*(tuple(part) for pair in numbers.dot_dimension_numbers for part in pair)]
    return [*parts, tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)]


def flops_of_convolution(eqn: Any) -> int:
    """Two for each multiplication, in one run of the equation."""
    out, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
    numbers = eqn.params["dimension_numbers"]
    return 2 * math.prod(out) * math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
