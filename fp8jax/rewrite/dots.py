"""The dot products of a function, the kernels that they use, and the plan of those to replace."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.dot import init_ragged_state, init_state, quantized_kernel
from fp8jax.dot.ragged_wide import RAGGED
from fp8jax.quantization import is_scaled, quantize
from fp8jax.recipe import Recipe
from fp8jax.rewrite.follow import ParamView
from fp8jax.scaling.block import with_seeds
from fp8jax.variables import SCALING

# Index of an equation, after the indices of the enclosing equations.
Site = tuple[int, ...]

DOTS = ("dot_general", "ragged_dot_general", RAGGED)

# The dimension numbers of `lax.ragged_dot`.
_ROWS_TIMES_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))

# Why a dot product of a closed-over matrix stays in high precision.
OF_CONSTANTS = "its kernel is a constant of the function: make it a parameter"


class Derived(NamedTuple):
    """A value computed from parameters only."""

    path: tuple[str, ...]  # path of the largest of these parameters
    size: int  # of this parameter
    reason: str
    loops: tuple[tuple[Site, int], ...]
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
    return Derived(x.path, x.size, reason, x.loops, is_opaque)


class Place(NamedTuple):
    """Where an equation is."""

    site: Site = ()
    scopes: tuple[str, ...] = ()  # named scopes and loops around it, see `find_dots`
    times: int = 1  # how often it runs in one call of the function


class Dot(NamedTuple):
    """One dot product of a jaxpr."""

    place: Place
    path: tuple[str, ...] | None  # path of its parameter; None if both operands are activations
    kernel: int  # which operand the parameter is, 0 or 1
    shape: tuple[int, ...]  # shape of the parameter in the dot product
    gemm: tuple[int, int, int]  # rows, inputs and outputs of its matrices
    flops: int  # in one call of the function
    loops: tuple[tuple[Site, int], ...]  # the scans that slice the parameter
    is_computed: bool  # whether the operand is computed from the parameter
    is_frozen: bool  # whether the parameter passed a `stop_gradient`
    groups: int  # number of groups of a ragged dot; 0 for other dots
    is_matrix: bool  # whether the stored parameter is a matrix (inputs, outputs)
    reason: str | None  # why it cannot run in FP8; None if it can
    layer: str = ""  # path of its layer, see `layer_paths`


def dot_of(eqn: Any, ins: list[Any], place: Place) -> Dot:
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
    x, is_batched = ins[kernel], bool(batched[kernel])
    is_matrix = isinstance(x, ParamView) and not (x.is_shared or groups or is_batched)
    return Dot(
        place=place,
        path=x.path if is_parameter(x) else None,
        kernel=kernel,
        shape=shapes[kernel],
        gemm=(free[1 - kernel], k, free[kernel]),
        flops=flops,
        loops=x.loops if is_parameter(x) else (),
        is_computed=isinstance(x, Derived),
        is_frozen=isinstance(x, ParamView) and x.is_frozen,
        groups=groups,
        # The contracted axes come first in storage.
        is_matrix=is_matrix
        and sorted(x.perm[axis] for axis in contracted[kernel]) == [*range(len(contracted[kernel]))],
        reason=_why_not(ins, kernels, len(shapes[1 - kernel]), contracted, ragged, is_complex),
    )


def _why_not(
    ins: list[Any], kernels: list[int], rank: int, contracted: Any, ragged: Any, is_complex: bool
) -> str | None:
    """Why a dot product cannot run in FP8; `rank` is the other operand's."""
    if not kernels:
        return OF_CONSTANTS if CONSTANT in ins else "both operands are activations"
    if is_complex:
        return "it multiplies complex numbers"
    if len(kernels) == 2:
        return "both operands are parameters"
    [kernel] = kernels
    x, other = ins[kernel], ins[1 - kernel]
    if isinstance(x, Derived) and x.is_opaque:
        return x.reason
    if other is ONE_HOT:
        return "it looks up rows of a table"
    if other in (None, CONSTANT):
        return "it multiplies no input of the model"
    if rank == 1:
        return "it multiplies a single vector"
    if ragged is not None and (
        kernel != 1 or isinstance(x, Derived) or _as_tuples(ragged) != _as_tuples(_ROWS_TIMES_GROUPS)
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


# The dot products to replace #####################################################################

# The `checkpoint_name` of the outputs of kernels' dot products.
DOT_OUTPUT = "fp8jax_dot_output"


class Kernel(NamedTuple):
    """A parameter of dot products with a recipe: its scales and its scaling state."""

    recipe: Recipe
    layers: tuple[int, ...]  # leading axes of stacked layers; each layer has a scale and a state
    groups: int  # number of experts, the next axis; 0 without experts

    def rank(self, x: Any) -> int:
        """The rank of the part of the parameter `x` that one scale covers."""
        return x.ndim - len(self.layers) - bool(self.groups)

    def first_state(self, key: Iterable[Any]) -> dict[str, jax.Array]:
        """The initial scaling state of its dot product with this key."""
        if not self.recipe.is_quantized:
            return {}
        state = init_ragged_state(self.recipe, self.groups) if self.groups else init_state(self.recipe)
        # On a mesh with explicit axes the copy has the same type as the states that a step returns.
        copies = {name: jnp.copy(jnp.broadcast_to(x, (*self.layers, *x.shape))) for name, x in state.items()}
        return with_seeds(copies, "/".join(map(str, key)))

    def in_format(self, x: Any, format: str | None = None) -> Any:
        """The parameter `x` in a storage format, by default its recipe's; scales are powers of two, one for
        each layer and expert."""
        format = format or self.recipe.weight
        if is_scaled(x) or format == "FP32":
            return x
        if format == "BF16":
            return x.astype(jnp.bfloat16)
        rank = self.rank(x)
        blocks = (*x.shape[: x.ndim - rank], *(1,) * rank)
        q = quantize(x, formats.get(format), power_of_two=True, blocks=blocks)
        return q.with_own_dtype(x.dtype)

    def for_inference(self, x: Any, state: Mapping[str, Any]) -> Any:
        """The parameter `x` in its GEMM's format, with the scales of `state`."""
        return quantized_kernel(x, self.recipe, dict(state), self.rank(x))


class DotState(NamedTuple):
    """The arrays of one dot product beside its operands."""

    scaling: dict[str, Any]  # the scaling state
    adapters: dict[str, Any]  # of `lora`


class PlannedDot(NamedTuple):
    """A dot product to replace, with its kernel."""

    dot: Dot
    key: tuple[str, ...]  # key of its scaling state
    kernel: Kernel

    @property
    def path(self) -> tuple[str, ...]:
        """The path of its parameter."""
        assert self.dot.path is not None
        return self.dot.path

    def first_state(self) -> dict[str, jax.Array]:
        """The initial scaling state, with a leading axis for each scan that slices the kernel."""
        state = self.kernel.first_state(self.key)
        if self.key != self.path:
            state.pop("wgrad_scale", None)  # the parameter has one gradient
        return state

    def state_in(self, states: Mapping[str, Any]) -> Any:
        """The scaling state among nested dicts of states; {} if it has none.

        Raises:
            ValueError: `states` lack it.
        """
        if not self.first_state():
            return {}
        # States that `merge` merged by max have the parameter's own key.
        for key in (self.key, self.path):
            found: Any = states
            for name in key:
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        raise ValueError(
            f"`variables`: expected the scaling state of {'/'.join(self.path)!r} in the collection "
            f"{SCALING!r}; got none. Take it from `model.init(...)`, and give `apply` all of the variables, "
            "not 'params' alone."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The dot products of a jaxpr to replace, and how.

    Attributes:
        dots: the dot products to replace, by site.
        below: sites of all equations around them, around named dot products, or around calls of transformed
            functions.
        named: layers of the dot products that get a named scope, by site.
        remat: the blocks to checkpoint, a `remat.Remat`, or None.
        backend: the GEMM backend.
        lora_scale: alpha / rank of adapters.
    """

    dots: dict[Site, PlannedDot]
    below: frozenset[Site]
    named: dict[Site, str]
    remat: Any
    backend: str
    lora_scale: float

    @classmethod
    def of(
        cls,
        dots: Iterable[PlannedDot],
        named: Iterable[Dot] = (),
        programs: Iterable[Site] = (),
        remat: Any = None,
        backend: str = "auto",
        lora_scale: float = 1.0,
    ) -> "Plan":
        """Makes a plan; `programs` are sites of calls of transformed functions, with plans of their own."""
        by_site = {each.dot.place.site: each for each in dots}
        names = {dot.place.site: dot.layer for dot in named if dot.path is not None}
        below = {site[:n] for site in (*by_site, *programs, *names) for n in range(1, len(site))}
        return cls(by_site, frozenset(below), names, remat, backend, lora_scale)

    def kernels(self) -> dict[tuple[str, ...], PlannedDot]:
        """The kernels by path, each with its dot product inside the most scans, which decides the number of
        scales."""
        kernels: dict[tuple[str, ...], PlannedDot] = {}
        for each in self.dots.values():
            if each.path not in kernels or len(kernels[each.path].dot.loops) < len(each.dot.loops):
                kernels[each.path] = each
        return kernels
