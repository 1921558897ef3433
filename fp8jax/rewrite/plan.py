"""The dot products of a jaxpr with their parameters, and the plan of FP8 dot products for `evaluate`.

    found = find(jaxpr, ways)             # all dot products, with their sites and parameters
    plan = Plan.of(chosen)                # the FP8 dot products

The site of a dot product is the index of its equation, after the indices of the enclosing equations.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from fp8jax.recipe import Recipe
from fp8jax.rewrite.dots import (
    ACTIVATION,
    CONSTANT,
    DOTS,
    ONE_HOT,
    Activation,
    Dot,
    Lost,
    Site,
    as_lost,
    dot_of,
    flops_of_convolution,
    is_parameter,
)
from fp8jax.rewrite.follow import Way, follow, sliced

# Calls that `evaluate` inlines, and the parameter with their inner jaxpr.
INNER = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMATS = {"checkpoint": "jaxpr", "remat2": "jaxpr", "remat": "jaxpr"}

# The primitive of calls of transformed functions, see `call`.
PROGRAM = "fp8_program"


# The reason for dot products of closed-over matrices.
@dataclasses.dataclass(frozen=True)
class Chosen:
    """A dot product to replace, with its recipe."""

    dot: Dot
    key: tuple[str, ...]  # key of its scaling state
    recipe: Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The dot products of a jaxpr to replace.

    Attributes:
        chosen: the dot products to replace, by site.
        below: sites of all equations around them, around named dot products, or around calls of transformed
            functions.
        sliced: for each scan, by site, the keys of the states that it slices.
        named: parameter paths of the dot products that get a named scope, by site.
    """

    chosen: dict[Site, Chosen]
    below: frozenset[Site]
    sliced: dict[Site, frozenset[tuple[str, ...]]]
    named: dict[Site, tuple[str, ...]]

    @classmethod
    def of(cls, chosen: Iterable[Chosen], programs: Iterable[Site] = (), named: Iterable[Dot] = ()) -> "Plan":
        """Makes a plan.

        Args:
            chosen: the dot products to replace.
            programs: sites of calls of transformed functions; each has its own plan.
            named: dot products that get a named scope.
        """
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
    """The uses of a parameter that contribute to its gradient."""

    dots: int = 0  # number of FP8 dot products
    others: int = 0  # number of other equations that read its value
    is_shared: bool = False  # whether a dot product uses it as a loop constant, or uses a part of it


class Found(NamedTuple):
    """The result of `find`."""

    dots: list[Dot]
    tables: set[tuple[str, ...]]  # parameters with row lookups, such as embeddings
    convolutions: dict[tuple[str, tuple[str, ...] | None], int]  # FLOPs by named scope and parameter
    uses: dict[tuple[str, ...], Uses]
    programs: list[Site]  # sites of calls of transformed functions


def find(jaxpr: Any, ways: Sequence[Way | None]) -> Found:
    """The dot products of a jaxpr, in order.

    Args:
        jaxpr: an open jaxpr.
        ways: for each of the first inputs, the model's own, the way of a parameter, or None if it cannot be a
            kernel. The other inputs are activations.
    """
    walk = _Walk(Found([], set(), {}, {}, []))
    others = [ACTIVATION] * (len(jaxpr.invars) - len(ways))
    outs = walk.through(jaxpr, [*ways, *others], (), "", 1)
    for out in outs:
        walk.note_value(out)
    return walk.found


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Abstract evaluation of a jaxpr.

    A value is a `Way` (a parameter), a `Lost` (computed from parameters), an `Activation`, a `CONSTANT`, or
    None (another constant, or a parameter that cannot be a kernel).
    """

    found: Found
    plan: Plan | None = None  # plan of the enclosing transformed function
    outside: int = 0  # length of the site of the enclosing transformed function's call

    def through(self, jaxpr: Any, ins: Sequence[Any], site: Site, scope: str, times: int) -> list[Any]:
        """The outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((var, CONSTANT) for var in jaxpr.constvars if len(var.aval.shape) > 1)

        def read(var: Any) -> Any:
            return None if isinstance(var, jex.Literal) else env.get(var)

        for number, eqn in enumerate(jaxpr.eqns):
            names = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            outs = self.outputs(eqn, [read(var) for var in eqn.invars], (*site, number), names, times)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def note_value(self, x: Any) -> None:
        """Counts a use of a parameter's value."""
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
            key = scope, ins[1].path if is_parameter(ins[1]) else None
            before = self.found.convolutions.get(key, 0)
            self.found.convolutions[key] = before + times * flops_of_convolution(eqn)
        elif _makes_one_hot(eqn, ins):
            return [ONE_HOT]
        elif ins and isinstance(ins[0], Way):
            ways = [follow(ins[0], eqn, i) for i in range(count)]
            if all(way is not None for way in ways):
                return ways
        return [self.computed(ins, name)] * count

    def computed(self, ins: list[Any], name: str, is_noted: bool = False) -> Any:
        """The output of an equation that computes a new value."""
        for x in () if is_noted else ins:
            self.note_value(x)
        if any(isinstance(x, Activation) for x in ins):
            return ACTIVATION
        parameters = [x for x in ins if is_parameter(x)]
        if not parameters:
            return CONSTANT if CONSTANT in ins else None
        return as_lost(parameters[0], f"its kernel is computed ({name})")

    def scan(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> list[Any]:
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry, xs = scan_parts(eqn, ins)
        for x in carry:
            self.note_value(x)
        carry = [ACTIVATION if is_parameter(x) else x for x in carry]
        # In later iterations the carry depends on all inputs of the body.
        if any(isinstance(x, Activation) for x in [*consts, *carry, *xs]):
            carry = [ACTIVATION] * len(carry)
        consts = [dataclasses.replace(x, is_shared=True) if isinstance(x, Way) else x for x in consts]
        inside = []
        for x in xs:
            if isinstance(x, Way):
                way = sliced(x, at, length)
                if way is None:
                    self.note_value(x)
                x = as_lost(x, "a scan is not along the first axis of what is stored") if way is None else way
            inside.append(x)
        outs = self.through(closed.jaxpr, [*consts, *carry, *inside], at, scope, times * length)
        for x in outs:
            self.note_value(x)
        return [as_lost(x, "a scan computes its kernel", True) if is_parameter(x) else x for x in outs]

    def opaque(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> None:
        """Finds the dot products inside a call that `evaluate` does not look into."""
        reason = f"it is inside of a {eqn.primitive.name}"
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            axes = eqn.params.get("newly_manual_axes", mesh.axis_names)
            times *= math.prod(mesh.shape[axis] for axis in axes)  # its shapes are per device
        lost = [as_lost(x, reason, True) if is_parameter(x) else x for x in ins]
        parameters = [x for x in lost if isinstance(x, Lost)]
        is_choice = eqn.primitive.name == "by_platform"  # one of two programs
        inners = [eqn.params["default"].jaxpr] if is_choice else jex.jaxprs_in_params(eqn.params)
        for number, inner in enumerate(inners):
            # Inputs correspond one to one only if their numbers are equal.
            given = lost if len(inner.invars) == len(ins) else lost[max(len(ins) - len(inner.invars), 0) :]
            given = [*given, *([parameters[0] if parameters else None] * (len(inner.invars) - len(given)))]
            self.through(inner, given, (*at, number), scope, times)

    def dot(self, eqn: Any, ins: list[Any], at: Site, scope: str, times: int) -> None:
        dot = dot_of(eqn, ins, at, scope, times)
        self.found.dots.append(dot)
        if dot.path is not None and ins[1 - dot.kernel] is ONE_HOT:
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
    return eqn.primitive.name in moves and ins[0] is ONE_HOT


def inner_jaxprs(eqn: Any) -> list[tuple[Site, Any]]:
    """The inner jaxprs that `evaluate` looks into, each with the index that its site adds."""
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
