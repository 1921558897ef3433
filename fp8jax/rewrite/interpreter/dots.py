"""The dot products of a function, and the kernels that they use."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from fp8jax.dot.ragged import RAGGED
from fp8jax.rewrite.interpreter.param_view import ParamView

# Index of an equation, after the indices of the enclosing equations.
Site = tuple[int, ...]

DOTS = ("dot_general", "ragged_dot_general", RAGGED)

# The dimension numbers of `lax.ragged_dot`.
_ROWS_TIMES_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))

# Why a dot product of a closed-over matrix stays in high precision.
OF_CONSTANTS = "its kernel is a constant of the function: make it a parameter"
# Why others do.
OF_ROWS = "it looks up rows of a table"
OF_NO_INPUT = "it multiplies no input of the model"
OF_A_VECTOR = "it multiplies a single vector"


class Derived(NamedTuple):
    """A value computed from parameters only."""

    path: tuple[str, ...]  # path of the largest of these parameters
    size: int  # of this parameter
    dtype: Any  # of this parameter
    paths: frozenset[tuple[str, ...]]  # paths of all of them
    reason: str
    loops: tuple[tuple[Site, int], ...]
    axes: tuple[int, ...]
    is_opaque: bool  # whether `evaluate` cannot replace dot products of this value, as inside a custom call


class Activation:
    """A value that depends on an input other than parameters."""


ACTIVATION, ONE_HOT = Activation(), Activation()  # ONE_HOT is cast from booleans: a one-hot lookup

CONSTANT = object()  # a closed-over matrix, or a value computed from one


def is_parameter(x: Any) -> bool:
    """Whether a value is a parameter or computed from parameters only."""
    return isinstance(x, ParamView | Derived)


def derived(x: ParamView | Derived, reason: str, is_opaque: bool = False) -> Derived:
    """A value computed from `x`, with the reason why its dot products cannot run in FP8."""
    if isinstance(x, Derived):
        return x._replace(reason=reason if is_opaque else x.reason, is_opaque=x.is_opaque or is_opaque)
    return Derived(x.path, x.size, x.dtypes[0], frozenset([x.path]), reason, x.loops, x.axes, is_opaque)


def derived_from(parameters: list[Any], reason: str) -> Derived:
    """A value computed from several parameters or values derived from them."""
    new = [derived(x, reason) for x in parameters]
    return max(new, key=lambda x: x.size)._replace(paths=frozenset().union(*(x.paths for x in new)))


class EquationPlace(NamedTuple):
    """Where an equation is."""

    site: Site = ()
    scopes: tuple[str, ...] = ()  # named scopes and loops around it, see `find_dots`
    times: int = 1  # how often it runs in one call of the function
    is_on_each: bool = False  # whether it is inside a `jax.shard_map`, on each of its devices


class Dot(NamedTuple):
    """One dot product of a jaxpr."""

    place: EquationPlace
    path: tuple[str, ...] | None  # path of its parameter; None if both operands are activations
    kernel: int  # which operand the parameter is, 0 or 1
    shape: tuple[int, ...]  # shape of the parameter in the dot product
    gemm: tuple[int, int, int]  # rows, inputs and outputs of its matrices
    flops: int  # in one call of the function
    loops: tuple[tuple[Site, int], ...]  # the scans that slice the parameter
    axes: tuple[int, ...]  # the axes of the stored parameter that they slice
    dtype: Any  # of the stored parameter; None without one
    computed: str | None  # how the operand is computed from the parameter; None for the parameter itself
    is_frozen: bool  # whether the parameter passed a `stop_gradient`
    groups: int  # number of groups of a ragged dot; 0 for other dots
    is_batched: bool  # whether it has batch dimensions
    is_matrix: bool  # whether the stored parameter is a matrix (inputs, outputs)
    reason: str | None  # why it cannot run in FP8; None if it can
    varies: frozenset[str]  # inside a `jax.shard_map`, the mesh axes that its output varies over
    layer: str = ""  # path of its layer, see `layer_paths`

    @property
    def is_computed(self) -> bool:
        """Whether the operand is computed from the parameter."""
        return self.computed is not None


def dot_of(eqn: Any, ins: list[Any], place: EquationPlace) -> Dot:
    """The dot product of an equation.

    Args:
        eqn: the equation.
        ins: its operands: a `ParamView`, a `Derived`, an `Activation`, `CONSTANT` or None.
        place: where it is.
    """
    ragged = _ROWS_TIMES_GROUPS if eqn.primitive.name == RAGGED else None
    ragged = eqn.params.get("ragged_dot_dimension_numbers", ragged)
    dims = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contracted, batched), shapes = dims, [tuple(x.aval.shape) for x in eqn.invars[:2]]
    free = [
        math.prod(n for axis, n in enumerate(shape) if axis not in (*contracted[side], *batched[side]))
        for side, shape in enumerate(shapes)
    ]
    k = math.prod(shapes[0][axis] for axis in contracted[0])
    is_complex = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)
    # A multiplication of complex numbers is four of real ones.
    flops = place.times * (8 if is_complex else 2) * math.prod(eqn.outvars[0].aval.shape) * k
    groups = 0
    if ragged is not None:
        groups = eqn.invars[2].aval.shape[-1]
        free[1] //= max(groups, 1)
        if set(ragged.lhs_ragged_dimensions) <= set(contracted[0]):
            flops //= max(groups, 1)
    kernels = [side for side in (0, 1) if is_parameter(ins[side])]
    kernel = kernels[0] if len(kernels) == 1 else 1
    x, is_grouped = ins[kernel], bool(groups or batched[kernel])
    return Dot(
        place=place,
        path=x.path if is_parameter(x) else None,
        kernel=kernel,
        shape=shapes[kernel],
        gemm=(free[1 - kernel], k, free[kernel]),
        flops=flops,
        loops=x.loops if is_parameter(x) else (),
        axes=x.axes if is_parameter(x) else (),
        dtype=_dtype(x),
        computed=_how_computed(x) if isinstance(x, Derived) else None,
        is_frozen=isinstance(x, ParamView) and x.is_frozen,
        groups=groups,
        is_batched=bool(batched[0]) and not groups,
        is_matrix=not is_grouped and _is_matrix(x, contracted[kernel]),
        reason=_why_not(ins, kernels, len(shapes[1 - kernel]), contracted, ragged, is_complex, place),
        varies=frozenset(eqn.outvars[0].aval.manual_axis_type.varying),
    )


def _is_matrix(x: Any, contracted: Sequence[int]) -> bool:
    """Whether a value is a whole parameter, or one layer of it, with the contracted axes first in storage.
    Axes of stacked layers come before them."""
    if not isinstance(x, ParamView) or x.is_shared or x.axes != tuple(range(len(x.axes))):
        return False
    return sorted(x.perm[axis] for axis in contracted) == [*range(len(contracted))]


def _how_computed(x: Derived) -> str:
    return x.reason if len(x.paths) == 1 else f"{x.reason}, of {len(x.paths)} parameters"


def _dtype(x: Any) -> Any:
    """The dtype of the parameter that an operand is, or is computed from; None without a parameter."""
    if isinstance(x, Derived):
        return x.dtype
    return x.dtypes[0] if isinstance(x, ParamView) else None


def _why_not(
    ins: list[Any],
    kernels: list[int],
    rank: int,
    contracted: Any,
    ragged: Any,
    is_complex: bool,
    place: EquationPlace,
) -> str | None:
    """Why a dot product cannot run in FP8; `rank` is the other operand's."""
    if not kernels:
        return OF_CONSTANTS if any(x is CONSTANT for x in ins) else "both operands are activations"
    if is_complex:
        return "it multiplies complex numbers"
    if len(kernels) == 2:
        return "both operands are parameters"
    [kernel] = kernels
    x, other = ins[kernel], ins[1 - kernel]
    if isinstance(x, Derived) and x.is_opaque:
        return x.reason
    if other is ONE_HOT:
        return OF_ROWS
    if other is None or other is CONSTANT:
        return OF_NO_INPUT
    if rank == 1:
        return OF_A_VECTOR
    is_part = isinstance(x, Derived) and not place.is_on_each
    if ragged is not None and (
        kernel != 1 or is_part or _as_tuples(ragged) != _as_tuples(_ROWS_TIMES_GROUPS)
    ):
        return "it is not the ragged dot of rows and a kernel for each group"
    return None if contracted[0] else "it sums over no axis"


def _as_tuples(numbers: Any) -> list[tuple[int, ...]]:
    """Dimension numbers of a ragged dot, comparable."""
    parts = (part for pair in numbers.dot_dimension_numbers for part in pair)
    return [*map(tuple, parts), tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)]


def flops_of_convolution(eqn: Any) -> int:
    """Two for each multiplication, in one run of the equation."""
    out, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
    numbers = eqn.params["dimension_numbers"]
    return 2 * math.prod(out) * math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
