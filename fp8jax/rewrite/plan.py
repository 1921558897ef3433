"""The dot products of a jaxpr, which parameter each one takes, and which of them run in FP8.

    dots = find(jaxpr, ways, recipes)     # each dot product, and where it stands
    plan = Plan.of(chosen)                # those that run in FP8, for `evaluate`

A dot product is named by its site: the number of its equation, behind those of the equations around it.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
from jax import lax

from fp8jax.dot.ragged_wide import RAGGED
from fp8jax.recipe import Recipe
from fp8jax.rewrite.follow import Way, follow, sliced

Site = tuple[int, ...]

# Calls whose inner jaxpr is evaluated in their place, and the name of that jaxpr in their parameters.
INNER = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMATS = {"checkpoint": "jaxpr", "remat2": "jaxpr", "remat": "jaxpr"}

# The dimensions of `lax.ragged_dot`.
_PLAIN_RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))

# A call of a transformed function.
PROGRAM = "fp8_program"

# Why a dot product of a matrix that the function closes over stays as it is.
OF_CONSTANTS = "its kernel is a constant of the function: make it a parameter"

DOTS = ("dot_general", "ragged_dot_general", RAGGED)


class Lost(NamedTuple):
    """A value computed from parameters alone, which is no parameter any more."""

    path: tuple[str, ...]  # of the largest of them
    reason: str
    loops: tuple[tuple[Site, int], ...]
    is_opaque: bool  # inside of a call that cannot be evaluated in another way


class Dot(NamedTuple):
    """One dot product of a jaxpr."""

    site: Site
    path: tuple[str, ...] | None  # of the parameter that it takes; None: both operands are activations
    kernel: int  # which operand that is
    shape: tuple[int, ...]  # of the parameter, as the dot product takes it
    gemm: tuple[int, int, int]  # rows, inputs and outputs of its matrices
    flops: int  # in one call of the function
    scope: str  # name scopes of the equation, joined by "/"
    loops: tuple[tuple[Site, int], ...]  # the scans that slice the parameter
    is_computed: bool  # whether the operand is computed from the parameter
    groups: int  # of a ragged dot; 0: not ragged
    is_matrix: bool  # whether the parameter, as it is stored, is a matrix of inputs and outputs
    reason: str | None  # why it cannot run in FP8; None: it can

    @property
    def depth(self) -> int:
        """How many leading axes of the parameter are layers."""
        return len(self.loops)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """How one dot product runs in FP8."""

    dot: Dot
    key: tuple[str, ...]  # of its scaling state
    recipe: Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The dot products of a jaxpr that run in FP8.

    Attributes:
        chosen: by site.
        below: sites of all calls that have one of them, or a transformed function's call, inside.
        sliced: by the site of a scan, the keys of the states that it slices.
        named: the parameters of dot products that are named in the program, by site.
    """

    chosen: dict[Site, Chosen]
    below: frozenset[Site]
    sliced: dict[Site, frozenset[tuple[str, ...]]]
    named: dict[Site, tuple[str, ...]]

    @classmethod
    def of(cls, chosen: Iterable[Chosen], programs: Iterable[Site] = (), named: Iterable[Dot] = ()) -> "Plan":
        """A plan of these, of calls of transformed functions, which have plans of their own, and of dot
        products that are only named."""
        by_site = {each.dot.site: each for each in chosen}
        names = {dot.site: dot.path for dot in named if dot.path is not None}
        below = {site[:n] for site in (*by_site, *programs, *names) for n in range(1, len(site))}
        scans: dict[Site, set[tuple[str, ...]]] = {}
        for each in by_site.values():
            for site, _ in each.dot.loops:
                scans.setdefault(site, set()).add(each.key)
        return cls(by_site, frozenset(below), {site: frozenset(keys) for site, keys in scans.items()}, names)


@dataclasses.dataclass
class Uses:
    """What takes a parameter, where its gradient is asked for."""

    dots: int = 0  # FP8 dot products
    others: int = 0  # whatever else reads its value
    is_shared: bool = False  # whether a dot product takes it in a loop, or takes a part of it


class Found(NamedTuple):
    """What `find` finds."""

    dots: list[Dot]
    tables: set[tuple[str, ...]]  # parameters that a gather reads, such as embeddings
    convolutions: dict[tuple[str, tuple[str, ...] | None], int]  # FLOPs by name scope and parameter
    uses: dict[tuple[str, ...], Uses]
    programs: list[Site]  # of calls of transformed functions


def find(jaxpr: Any, ways: Sequence[Way | None]) -> Found:
    """The dot products of a jaxpr, in order.

    Args:
        jaxpr: without the constants' values.
        ways: of its first inputs, the model's own: those of parameters; None for what is no kernel. The other
            inputs are activations.
    """
    walk = _Walk(Found([], set(), {}, {}, []))
    others = [_ACTIVATION] * (len(jaxpr.invars) - len(ways))
    outs = walk.through(jaxpr, [*ways, *others], (), "", 1)
    for out in outs:
        walk.note_value(out)
    return walk.found


class _Activation:
    """A value that depends on an input that is no parameter."""


_ACTIVATION, _ONE_HOT = _Activation(), _Activation()  # the second is made of booleans, which look up a table

_CONSTANT = object()  # a matrix that the function closes over, or what is computed from one


def _is_parameter(x: Any) -> bool:
    return isinstance(x, Way | Lost)


def _lost(x: Way | Lost, reason: str, is_opaque: bool = False) -> Lost:
    if isinstance(x, Lost):
        return Lost(x.path, reason if is_opaque else x.reason, x.loops, x.is_opaque or is_opaque)
    return Lost(x.path, reason, x.loops, is_opaque)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Follows the inputs of a jaxpr to its outputs.

    A value is a `Way` (a parameter), a `Lost` (computed from parameters), an `_Activation`, a `_CONSTANT`, or
    None (another constant, or a parameter that is no kernel).
    """

    found: Found
    plan: Plan | None = None  # of the transformed function that it is inside of
    outside: int = 0  # length of that function's site

    def through(self, jaxpr: Any, ins: Sequence[Any], site: Site, scope: str, times: int) -> list[Any]:
        """The outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((var, _CONSTANT) for var in jaxpr.constvars if len(var.aval.shape) > 1)

        def read(var: Any) -> Any:
            return None if isinstance(var, jex.Literal) else env.get(var)

        for number, eqn in enumerate(jaxpr.eqns):
            names = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            outs = self.outputs(eqn, [read(var) for var in eqn.invars], (*site, number), names, times)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def note_value(self, x: Any) -> None:
        """Notes that something reads a parameter's value."""
        if isinstance(x, Way) and not x.is_frozen:
            self.found.uses.setdefault(x.path, Uses()).others += 1

    def outputs(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> list[Any]:
        """The outputs of an equation."""
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if name == "scan":
            return self.scan(eqn, ins, at, scope, times)
        if name in INNER or name in REMATS:
            inner = params[{**INNER, **REMATS}[name]]
            return self.through(getattr(inner, "jaxpr", inner), ins, at, scope, times)
        if name == "cond":
            branches = [
                self.through(closed.jaxpr, ins[1:], (*at, number), scope, times)
                for number, closed in enumerate(params["branches"])
            ]
            return [self.computed(list(outs), name) for outs in zip(*branches, strict=True)]
        if name == PROGRAM:
            self.found.programs.append(at)
            inside = _Walk(self.found, params["program"].context.plan, len(at))
            leaves, _, arrays, _ = params["treedef"].unflatten(ins)
            return inside.through(params["program"].jaxpr, [*leaves, *arrays], at, scope, times)
        if name in DOTS:
            self.dot(eqn, ins, at, scope, times)
            return [self.computed(ins, name, is_noted=True)]
        if any(True for _ in jex.jaxprs_in_params(params)):
            self.opaque(eqn, ins, at, scope, times)
        elif name == "gather" and isinstance(ins[0], Way):
            self.found.tables.add(ins[0].path)
        elif name == "conv_general_dilated":
            key = scope, ins[1].path if _is_parameter(ins[1]) else None
            before = self.found.convolutions.get(key, 0)
            self.found.convolutions[key] = before + times * _flops_of_convolution(eqn)
        elif _makes_one_hot(eqn, ins):
            return [_ONE_HOT]
        elif ins and isinstance(ins[0], Way):
            ways = [follow(ins[0], eqn, i) for i in range(count)]
            if all(way is not None for way in ways):
                return ways
        return [self.computed(ins, name)] * count

    def computed(self, ins: list[Any], name: str, is_noted: bool = False) -> Any:
        """What an equation makes that does more than move its input."""
        for x in () if is_noted else ins:
            self.note_value(x)
        if any(isinstance(x, _Activation) for x in ins):
            return _ACTIVATION
        parameters = [x for x in ins if _is_parameter(x)]
        if not parameters:
            return _CONSTANT if _CONSTANT in ins else None
        return _lost(parameters[0], f"its kernel is computed ({name})")

    def scan(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> list[Any]:
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry, xs = scan_parts(eqn, ins)
        for x in carry:
            self.note_value(x)
        carry = [_ACTIVATION if _is_parameter(x) else x for x in carry]
        # What is carried depends on the inputs as soon as one of them does.
        if any(isinstance(x, _Activation) for x in [*consts, *carry, *xs]):
            carry = [_ACTIVATION] * len(carry)
        consts = [dataclasses.replace(x, is_shared=True) if isinstance(x, Way) else x for x in consts]
        inside = []
        for x in xs:
            if isinstance(x, Way):
                way = sliced(x, at, length)
                if way is None:
                    self.note_value(x)
                x = _lost(x, "a scan is not along the first axis of what is stored") if way is None else way
            inside.append(x)
        outs = self.through(closed.jaxpr, [*consts, *carry, *inside], at, scope, times * length)
        for x in outs:
            self.note_value(x)
        return [_lost(x, "a scan computes its kernel", True) if _is_parameter(x) else x for x in outs]

    def opaque(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> None:
        """Finds the dot products inside of a call that is left as it is."""
        reason = f"it is inside of a {eqn.primitive.name}"
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            axes = eqn.params.get("newly_manual_axes", mesh.axis_names)
            times *= math.prod(mesh.shape[axis] for axis in axes)  # its shapes are those on one device
        lost = [_lost(x, reason, True) if _is_parameter(x) else x for x in ins]
        parameters = [x for x in lost if isinstance(x, Lost)]
        is_choice = eqn.primitive.name == "by_platform"  # one of two programs
        inners = [eqn.params["default"].jaxpr] if is_choice else jex.jaxprs_in_params(eqn.params)
        for number, inner in enumerate(inners):
            # Which input is which is known only where their numbers are equal.
            given = lost if len(inner.invars) == len(ins) else lost[max(len(ins) - len(inner.invars), 0) :]
            given = [*given, *([parameters[0] if parameters else None] * (len(inner.invars) - len(given)))]
            self.through(inner, given, (*at, number), scope, times)

    def dot(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> None:
        dot = _dot(eqn, ins, at, scope, times)
        self.found.dots.append(dot)
        if dot.path is not None and ins[1 - dot.kernel] is _ONE_HOT:
            self.found.tables.add(dot.path)
        is_fp8 = self.plan is not None and at[self.outside :] in self.plan.chosen
        for side, x in enumerate(ins):
            if not (is_fp8 and side == dot.kernel):
                self.note_value(x)
            elif isinstance(x, Way) and not x.is_frozen:
                uses = self.found.uses.setdefault(x.path, Uses())
                uses.dots, uses.is_shared = uses.dots + 1, uses.is_shared or x.is_shared


def _makes_one_hot(eqn: Any, ins: list[Any]) -> bool:
    if not ins:
        return False
    if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return ins[0] is not None
    moves = ("copy", "reshape", "transpose", "convert_element_type")
    return eqn.primitive.name in moves and ins[0] is _ONE_HOT


def inner_jaxprs(eqn: Any) -> list[tuple[Site, Any]]:
    """The jaxprs of an equation that can be evaluated in another way, and what their sites have more."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return [((), params["jaxpr"].jaxpr)]
    if name == "cond":
        return [((number,), closed.jaxpr) for number, closed in enumerate(params["branches"])]
    inner = params.get({**INNER, **REMATS}.get(name, ""))
    return [] if inner is None else [((), getattr(inner, "jaxpr", inner))]


def scan_parts(eqn: Any, values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Constants, carry and scanned inputs of a scan."""
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    return values[:consts], values[consts : consts + carry], values[consts + carry :]


def _dot(eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> Dot:
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
    kernels = [side for side in (0, 1) if _is_parameter(ins[side])]
    kernel = kernels[0] if len(kernels) == 1 else 1
    groups = 0
    if numbers is not None:
        groups = eqn.invars[2].aval.shape[-1]
        free[1] //= max(groups, 1)
        if set(numbers.lhs_ragged_dimensions) <= set(contracted[0]):
            flops //= max(groups, 1)
    gemm = (free[1 - kernel], k, free[kernel])
    x = ins[kernel]
    path = x.path if _is_parameter(x) else None
    reason = _why_not(eqn, ins, kernels, gemm, len(shapes[1 - kernel]), numbers)
    if reason is None and not contracted[0]:
        reason = "it sums over no axis"
    loops, is_computed = (x.loops, isinstance(x, Lost)) if _is_parameter(x) else ((), False)
    # The contracted axes are the first ones as they are stored, and there is no batch.
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
        return OF_CONSTANTS if _CONSTANT in ins else "both operands are activations"
    if len(kernels) == 2:
        return "both operands are parameters"
    [kernel] = kernels
    x = ins[kernel]
    if isinstance(x, Lost) and x.is_opaque:
        return x.reason
    if ins[1 - kernel] is _ONE_HOT:
        return "it looks up rows of a table"
    if ins[1 - kernel] in (None, _CONSTANT):
        return "it multiplies no input of the model"
    if rank == 1:
        return "it multiplies a single vector"
    if numbers is not None and (kernel != 1 or isinstance(x, Lost) or not _is_plain_ragged(numbers)):
        return "it is not the ragged dot of rows and a kernel for each group"
    return None


def _is_plain_ragged(numbers: Any) -> bool:
    """Whether it is what `lax.ragged_dot` computes."""
    return _parts(numbers) == _parts(_PLAIN_RAGGED)


def _parts(numbers: Any) -> list[tuple[int, ...]]:
    parts = [*(tuple(part) for pair in numbers.dot_dimension_numbers for part in pair)]
    return [*parts, tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)]


def _flops_of_convolution(eqn: Any) -> int:
    out, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
    numbers = eqn.params["dimension_numbers"]
    return 2 * math.prod(out) * math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
