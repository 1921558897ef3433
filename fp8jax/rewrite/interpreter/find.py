"""The dot products of a jaxpr: `find_dots` follows each parameter through the jaxpr to its dot products."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.dots import (
    ACTIVATION,
    CONSTANT,
    DOTS,
    ONE_HOT,
    Activation,
    Derived,
    Dot,
    EquationPlace,
    Site,
    derived,
    derived_from,
    dot_of,
    flops_of_convolution,
    is_parameter,
)
from fp8jax.rewrite.interpreter.param_view import ParamView, follow
from fp8jax.rewrite.patterns import layer_paths
from fp8jax.rewrite.plan import Kernel, Plan, PlannedDot
from fp8jax.rewrite.rules import UsedRule

# Calls that `evaluate` inlines, and those that it rematerializes.
CALLS = ("jit", "pjit", "closed_call", "core_call")
REMATS = ("checkpoint", "remat2", "remat")
SHARD_MAP = "shard_map"

# The primitive of calls of transformed functions, see `program.call`.
PROGRAM = "fp8_program"

# How dots leave the calls that `evaluate` does not look into.
_OWN_GRADIENT = ", which has a gradient of its own: take the matmul out of it"
_WAYS_OUT = {
    "custom_vjp_call": _OWN_GRADIENT,
    "custom_jvp_call": _OWN_GRADIENT,
    "while": ": make it a scan",
}
# Why dots inside of `platforms.by_platform` are not replaced.
_IN_FP8 = "it is in FP8 already: transform the plain model, or a function that calls the plain model"

_STATE = Activation()  # a part of the scaling states that the gradient renews
_STATE_INSIDE = (
    "`loss_fn`: expected no `jax.shard_map` around the call of a model with a scaling state, whose amaxes "
    "each device would see alone; got one, for {}. Take the gradient inside of it, by "
    "`fp8jax.value_and_grad(loss_fn, axis_name=...)`, or use a recipe without a state, as `current`."
)

# The scopes of the body of a scan and of a `jax.checkpoint`, beside the named scopes.
SCAN, CHECKPOINT = "<scan>", "<checkpoint>"


@dataclasses.dataclass
class Uses:
    """The uses of a parameter that contribute to its gradient, and all that read it."""

    dots: int = 0  # number of FP8 dot products
    others: int = 0  # number of other equations that read its value
    is_shared: bool = False  # whether a dot product uses it as a loop constant, or uses a part of it
    is_batched: bool = False  # whether a transformed function under a `jax.vmap` of its inputs uses it
    kernel: Kernel | None = None  # of its first FP8 dot product, even a frozen one
    reads: int = 0  # number of equations that read its value, frozen or not; without planned dot products


class FoundDots(NamedTuple):
    """The result of `find_dots`."""

    dots: list[Dot]
    tables: dict[tuple[str, ...], tuple[int, ...]]  # shapes of parameters with row lookups, as embeddings
    convolutions: dict[tuple[str, tuple[str, ...] | None], int]  # FLOPs by named scope and parameter
    uses: dict[tuple[str, ...], Uses]
    programs: list[Site]  # sites of calls of transformed functions
    recipes: list[Recipe]  # of these functions
    rules: list[UsedRule]  # of these functions
    planned: list[PlannedDot]  # the dot products that these functions replace


def find_dots(jaxpr: jex.Jaxpr, views: Sequence[ParamView | None], states: int = 0) -> FoundDots:
    """The dot products of a jaxpr, in order.

    Args:
        jaxpr: an open jaxpr.
        views: for each of the first inputs, the model's own, the view of a parameter, or None if it cannot be
            a kernel. The other inputs are activations.
        states: how many of the next inputs are the scaling states that the gradient renews.

    Raises:
        ValueError: a model with such a state is called inside a `jax.shard_map`, or a sharding constraint
            names an axis of a `jax.shard_map` around this call.
    """
    finder = _DotFinder(FoundDots([], {}, {}, {}, [], [], [], []))
    others = [ACTIVATION] * (len(jaxpr.invars) - len(views) - states)
    for out in finder.through(jaxpr, [*views, *[_STATE] * states, *others], EquationPlace()):
        finder.note_value(out)
    layers = layer_paths(dot.path for dot in finder.found.dots if dot.path is not None)
    dots = [dot if dot.path is None else dot._replace(layer=layers[dot.path]) for dot in finder.found.dots]
    return finder.found._replace(dots=dots)


@dataclasses.dataclass(frozen=True)
class _DotFinder:
    """Abstract evaluation of a jaxpr.

    A value is a `ParamView` (a parameter), a `Derived` (computed from parameters), an `Activation`, a
    `CONSTANT`, or None (another constant, or a parameter that cannot be a kernel).
    """

    found: FoundDots
    plan: Plan | None = None  # plan of the enclosing transformed function
    outside: int = 0  # length of the site of the enclosing transformed function's call

    def through(self, jaxpr: Any, ins: Sequence[Any], place: EquationPlace) -> list[Any]:
        """The outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update((var, CONSTANT) for var in jaxpr.constvars if len(var.aval.shape) > 1)

        def read(var: Any) -> Any:
            return None if isinstance(var, jex.Literal) else env.get(var)

        for number, eqn in enumerate(jaxpr.eqns):
            scopes = (*place.scopes, str(eqn.source_info.name_stack))
            inside = place._replace(site=(*place.site, number), scopes=scopes)
            outs = self.outputs(eqn, [read(var) for var in eqn.invars], inside)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def note_value(self, x: Any) -> None:
        """Counts a use of a parameter's value."""
        if isinstance(x, ParamView):
            uses = self.found.uses.setdefault(x.path, Uses())
            uses.reads, uses.others = uses.reads + 1, uses.others + (not x.is_frozen)

    def outputs(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> list[Any]:
        """The outputs of an equation."""
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if name == "scan":
            return self.scan(eqn, ins, place)
        if name in CALLS or name in REMATS:
            inside = place._replace(scopes=(*place.scopes, CHECKPOINT)) if name in REMATS else place
            return self.through(inner_jaxpr(eqn)[0], ins, inside)
        if name == SHARD_MAP:
            self.shard_map(eqn, ins, place)
            return [self.computed(ins, name)] * count
        if name == "cond":
            branches = [
                self.through(closed.jaxpr, ins[1:], place._replace(site=(*place.site, number)))
                for number, closed in enumerate(params["branches"])
            ]
            return [self.computed(list(outs), name) for outs in zip(*branches, strict=True)]
        if name == PROGRAM:
            return self.program(eqn, ins, place)
        if name in DOTS:
            self.dot(eqn, ins, place)
            return [self.computed(ins, name, is_noted=True)]
        if name == "sharding_constraint":
            _check_spec(getattr(params["sharding"], "spec", ()))
        if any(True for _ in jex.jaxprs_in_params(params)):
            self.opaque(eqn, ins, place)
        elif _makes_one_hot(eqn, ins):
            return [ONE_HOT]
        elif ins and isinstance(ins[0], ParamView) and (view := follow(ins[0], eqn)) is not None:
            return [view] * count
        self.note_other(eqn, ins, place)
        return [self.computed(ins, name)] * count

    def computed(self, ins: list[Any], name: str, is_noted: bool = False) -> Any:
        """The output of an equation that computes a new value."""
        for x in () if is_noted else ins:
            self.note_value(x)
        if any(isinstance(x, Activation) for x in ins):
            return ACTIVATION
        parameters = [x for x in ins if is_parameter(x)]
        if not parameters:
            return CONSTANT if any(x is CONSTANT for x in ins) else None
        return derived_from(parameters, f"its kernel is computed ({name})")

    def program(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> list[Any]:
        """The outputs of a call of a transformed function."""
        program = eqn.params["program"]
        self.found.programs.append(place.site)
        self.found.recipes.append(program.recipe)
        self.found.rules.extend(program.rules)
        self.found.planned.extend(program.plan.dots.values())
        leaves, states, arrays, _ = eqn.params["treedef"].unflatten(ins)
        if place.is_on_each and any(x is _STATE for x in jax.tree.leaves(states)):
            raise ValueError(_STATE_INSIDE.format(program.recipe))
        batched = [axis.size for _, axis in eqn.params["batched"]]
        for x in leaves if batched else ():
            if isinstance(x, ParamView):
                self.found.uses.setdefault(x.path, Uses()).is_batched = True
        place = place._replace(times=place.times * math.prod(batched))
        finder = _DotFinder(self.found, program.plan, len(place.site))
        return finder.through(program.jaxpr, [*leaves, *arrays], place)

    def note_other(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> None:
        """Notes a lookup of a parameter's rows, or a convolution."""
        if eqn.primitive.name == "gather" and isinstance(ins[0], ParamView):
            table: Any = eqn.invars[0].aval
            self.found.tables[ins[0].path] = tuple(table.shape)
        elif eqn.primitive.name == "conv_general_dilated":
            scope = "/".join(each for each in place.scopes if each not in ("", SCAN, CHECKPOINT))
            key = scope, ins[1].path if is_parameter(ins[1]) else None
            before = self.found.convolutions.get(key, 0)
            self.found.convolutions[key] = before + place.times * flops_of_convolution(eqn)

    def scan(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> list[Any]:
        """The outputs of a scan."""
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry, xs = scan_parts(eqn, ins)
        place = place._replace(scopes=(*place.scopes, SCAN), times=place.times * length)
        for x in carry:
            self.note_value(x)
        carry = [ACTIVATION if is_parameter(x) else x for x in carry]
        # In later iterations the carry depends on all inputs of the body.
        if any(isinstance(x, Activation) for x in [*consts, *carry, *xs]):
            carry = [ACTIVATION] * len(carry)
        consts = [dataclasses.replace(x, is_shared=True) if isinstance(x, ParamView) else x for x in consts]
        inside = []
        for x in xs:
            if isinstance(x, ParamView):
                layer = x.in_scan(place.site, length)
                if layer is None:
                    self.note_value(x)
                    layer = derived(x, "a scan is not along an axis of what is stored")
                x = layer
            inside.append(x)
        outs = self.through(closed.jaxpr, [*consts, *carry, *inside], place)
        for x in outs:
            self.note_value(x)
        return [derived(x, "a scan computes its kernel", True) if is_parameter(x) else x for x in outs]

    def shard_map(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> None:
        """Finds the dot products inside a `jax.shard_map`, which see the devices' parts of parameters."""
        mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
        devices = math.prod(mesh.shape[axis] for axis in axes)
        place = place._replace(times=place.times * devices, is_on_each=True)
        ins = [derived(x, f"it is inside of a {SHARD_MAP}") if is_parameter(x) else x for x in ins]
        self.through(inner_jaxpr(eqn)[0], ins, place)

    def opaque(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> None:
        """Finds the dot products inside a call that `evaluate` does not look into."""
        name, params = eqn.primitive.name, eqn.params
        reason = _IN_FP8 if name == "by_platform" else f"it is inside of a {name}{_WAYS_OUT.get(name, '')}"
        ins = [derived(x, reason, True) if is_parameter(x) else x for x in ins]
        parameter = next((x for x in ins if isinstance(x, Derived)), None)
        for number, inner in enumerate(jex.jaxprs_in_params(params)):
            # Inputs correspond one to one only if their numbers are equal.
            given = ins[max(len(ins) - len(inner.invars), 0) :]
            given = [*given, *[parameter] * (len(inner.invars) - len(given))]
            self.through(inner, given, place._replace(site=(*place.site, number)))

    def dot(self, eqn: jex.JaxprEqn, ins: list[Any], place: EquationPlace) -> None:
        """Notes a dot product."""
        dot = dot_of(eqn, ins, place)
        self.found.dots.append(dot)
        if dot.path is not None and ins[1 - dot.kernel] is ONE_HOT:
            self.found.tables[dot.path] = dot.shape
        planned = self.plan and self.plan.dots.get(place.site[self.outside :])
        for side, x in enumerate(ins):
            if planned is None or side != dot.kernel:
                self.note_value(x)
            elif isinstance(x, ParamView):
                uses = self.found.uses.setdefault(x.path, Uses())
                uses.kernel = uses.kernel or planned.kernel
                if not x.is_frozen:
                    uses.dots, uses.is_shared = uses.dots + 1, uses.is_shared or x.is_shared


def _check_spec(spec: Any) -> None:
    """Raises ValueError for a constraint that JAX refuses, too, but only when it lowers."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if named := [axis for axis in jax.tree.leaves(tuple(spec)) if axis in manual]:
        raise ValueError(
            f"the sharding constraint {spec!r} contains the manual axis {named[0]!r}, over which a "
            "`jax.shard_map` around it maps. Leave it out: each device has its own part already."
        )


def _makes_one_hot(eqn: Any, ins: list[Any]) -> bool:
    if not ins:
        return False
    if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return ins[0] is not None
    moves = ("copy", "reshape", "transpose", "convert_element_type")
    return eqn.primitive.name in moves and ins[0] is ONE_HOT


def inner_jaxpr(eqn: jex.JaxprEqn) -> tuple[Any, Any]:
    """The open jaxpr of a call, and its constants."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def scan_parts(eqn: jex.JaxprEqn, values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Constants, carry and scanned inputs of a scan."""
    if "ft_in" in eqn.params:  # since JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    return values[:consts], values[consts : consts + carry], values[consts + carry :]
