"""Evaluation of a jaxpr with the planned dot products in FP8.

All other equations are bound unchanged, including calls and loops without an FP8 dot product.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

# No public API gives a rebound equation its original name stack and traceback.
from jax._src import source_info_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8jax import formats, scaling
from fp8jax.dot import OUTPUT, Weight, dot_general, ragged_dot
from fp8jax.dot.layout import einsum_by
from fp8jax.quantization import ScaledArray
from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.dots import Site
from fp8jax.rewrite.interpreter.find import CALLS, PROGRAM, REMATS, SHARD_MAP, inner_jaxpr, scan_parts
from fp8jax.rewrite.interpreter.param_view import ParamView, Tracked, bind, move, transpose, untracked
from fp8jax.rewrite.plan import DotState, Plan, PlannedDot
from fp8jax.rewrite.producers import Producer, producers
from fp8jax.rewrite.report import scope
from fp8jax.scaling.merge import first_state, fm32, state_copies, states_of_uses

# By the key of the dot product; without an entry it has no state.
States = Mapping[tuple[str, ...], DotState]
_NO_STATE = DotState({})


def evaluate(
    plan: Plan, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], states: States, site: Site = ()
) -> list[jax.Array]:
    """The outputs of a jaxpr.

    Args:
        plan: the plan of this jaxpr.
        jaxpr: the function's jaxpr.
        consts: constants of the jaxpr.
        args: arrays, and a `Tracked` for each parameter.
        states: the scaling states of the plan's dot products, by key. For a plan without dot products, the
            plug-ins for dot products of the transformed functions in it: `around(state)` adds one to a state.
        site: the site of the jaxpr.
    """
    return [untracked(x) for x in _run(plan, jaxpr, consts, args, states, site)]


def _run(
    plan: Plan, jaxpr: jex.Jaxpr, consts: Any, args: Sequence[Any], states: States, site: Site
) -> list[Any]:
    """The outputs of a jaxpr; parameters that it only moves stay `Tracked`."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    shared = _shared_states(jaxpr)
    of_uses = {var: iter(states_of_uses(env[var], shared[var])) for var in jaxpr.invars if var in shared}

    def read(var: Any) -> Any:
        if isinstance(var, jex.Literal):
            return var.val
        return next(of_uses[var]) if var in of_uses else env[var]

    computed, own = _producers(plan, jaxpr, site), _states_of_equations(plan, states, site)
    for number, (eqn, last) in enumerate(zip(jaxpr.eqns, last_uses(jaxpr, computed), strict=True)):
        producer, of_eqn = computed.get(number), {**states, **own[number]} if number in own else states
        made = producer and functools.partial(
            producer.of, values=[untracked(read(x)) for x in producer.inputs]
        )
        outs = _outputs(plan, eqn, [read(var) for var in eqn.invars], of_eqn, (*site, number), made)
        env.update(zip(eqn.outvars, outs, strict=True))
        of_uses |= {var: iter(states_of_uses(env[var], shared[var])) for var in eqn.outvars if var in shared}
        for var in last:
            env.pop(var, None)
    return [read(var) for var in jaxpr.outvars]


def _shared_states(jaxpr: jex.Jaxpr) -> dict[Any, int]:
    """The number of uses of the variables that are scaling states and have several."""
    used = [var for eqn in jaxpr.eqns for var in eqn.invars] + list(jaxpr.outvars)
    uses = collections.Counter(var for var in used if not isinstance(var, jex.Literal))
    return {var: n for var, n in uses.items() if n > 1 and getattr(var.aval, "dtype", None) == fm32}


def _states_of_equations(plan: Plan, states: States, site: Site) -> dict[int, dict[Any, DotState]]:
    """The states of equations that share them with others, by the equation's number and the state's key."""
    users: dict[Any, dict[int, None]] = {}
    for at, each in plan.dots.items():
        if at[: len(site)] == site and states.get(each.key, _NO_STATE).scaling:
            users.setdefault(each.key, {})[at[len(site)]] = None
    own: dict[int, dict[Any, DotState]] = {}
    for key, numbers in users.items():
        if len(numbers) > 1:
            of_uses = states_of_uses(states[key].scaling, len(numbers))
            for number, scaling in zip(numbers, of_uses, strict=True):
                own.setdefault(number, {})[key] = states[key]._replace(scaling=scaling)
    return own


def _producers(plan: Plan, jaxpr: jex.Jaxpr, site: Site) -> dict[int, Producer]:
    """How the inputs of a jaxpr's planned dot products are computed, by the numbers of their equations."""
    operands = {
        at[-1]: 1 - planned.dot.kernel
        for at, planned in plan.dots.items()
        if at[:-1] == site and _takes_computed(planned)
    }
    return producers(jaxpr, operands) if operands else {}


def _takes_computed(planned: PlannedDot) -> bool:
    recipe = planned.kernel.recipe
    return recipe.is_quantized and not planned.dot.groups and scaling.of_recipe(recipe).takes_computed


def last_uses(jaxpr: jex.Jaxpr, computed: Mapping[int, Producer] | None = None) -> list[set[Any]]:
    """For each equation, the variables that no later one needs, so that an eager call frees them.

    `computed` equations read the inputs of their producers, too.
    """
    computed = computed or {}
    last, needed = [], {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
    for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
        read = (*eqn.invars, *(computed[number].inputs if number in computed else ()))
        last.append({var for var in read if not isinstance(var, jex.Literal)} - needed)
        needed |= last[-1]
    return last[::-1]


def _outputs(
    plan: Plan, eqn: jex.JaxprEqn, ins: list[Any], states: States, site: Site, made: Any
) -> Sequence[Any]:
    """The outputs of an equation; `made` is how the input of a dot product is computed."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        if site in plan.dots:
            with scope(plan.dots[site].dot.layer):
                return [_dot(plan, eqn, plan.dots[site], ins, states, made)]
        if eqn.primitive.name == PROGRAM:
            leaves, own, arrays, consts = eqn.params["treedef"].unflatten(ins)
            own, arrays = jax.tree.map(untracked, (own, arrays), is_leaf=lambda x: isinstance(x, Tracked))
            around = {key: states[key].plugin.around(state) for key, state in own.items() if key in states}
            program, batched = eqn.params["program"], eqn.params["batched"]
            return program.run(leaves, {**own, **around}, arrays, consts, batched)
        if site in plan.below and eqn.primitive.name in _INSIDE:
            return _INSIDE[eqn.primitive.name](plan, eqn, ins, states, site)
        if ins and isinstance(ins[0], Tracked) and (outs := move(ins[0], eqn, ins[1:])) is not None:
            return outs
        with scope(plan.named[site]) if site in plan.named else contextlib.nullcontext():
            return bind(eqn, *map(untracked, ins))


def _dot(plan: Plan, eqn: Any, planned: PlannedDot, ins: list[Any], states: States, made: Any) -> jax.Array:
    """One dot product under its recipe. The kernel is used in its storage format and axis order."""
    which, recipe, out_dtype = planned.dot.kernel, planned.kernel.recipe, eqn.outvars[0].aval.dtype
    state = states.get(planned.key, _NO_STATE)
    for _ in range(state.depth(planned.kernel)):
        # One dot product of stacked kernels, as under `nnx.vmap`: all share the state of the first layer.
        state = jax.tree.map(first_state, state)
    if not recipe.is_quantized and state.plugin is None:
        return _high_precision_dot(eqn, recipe, ins)
    options = {"recipe": recipe, "backend": plan.backend, "out_dtype": out_dtype, "state": state.scaling}
    other, kernel = untracked(ins[1 - which]), ins[which]
    if not isinstance(kernel, Tracked):
        kernel = Tracked(Weight(kernel), ParamView.of(planned.path, kernel))
    if planned.dot.groups:
        groups = kernel.value() if kernel.view.is_transposed else kernel.kernel
        sizes, over = untracked(ins[2]), eqn.params.get("over")
        if recipe.is_quantized:
            out = checkpoint_name(ragged_dot(other, groups, sizes, over=over, **options), OUTPUT)
        else:
            out = _high_precision_dot(eqn, recipe, ins)
        if state.plugin is None:
            return out
        added = state.plugin.output_of_groups(other, Weight.of(groups), sizes, over=over, dtype=out.dtype)
        return out + added
    subscripts = _subscripts(eqn, which, kernel.view.perm)
    if recipe.is_quantized:
        dot = functools.partial(_named_dot, **options, computed=made)
        out = einsum_by(subscripts, other, kernel.kernel, dot, eqn.params.get("out_sharding"))
    else:
        out = _high_precision_dot(eqn, recipe, ins)
    if state.plugin is None:
        return out
    dtype = out_dtype if recipe.is_quantized else formats.get(recipe.gemm).dtype
    added = functools.partial(state.plugin.output, dtype=dtype)
    return out + einsum_by(subscripts, other, kernel.weight, added).astype(out_dtype)


def _named_dot(*operands: Any, **options: Any) -> jax.Array:
    return checkpoint_name(dot_general(*operands, **options), OUTPUT)


def _subscripts(eqn: jex.JaxprEqn, which: int, perm: tuple[int, ...]) -> str:
    """A dot product as an einsum of its other operand, number `1 - which`, and the stored kernel. Axis i of
    the kernel is axis `perm[i]` of the stored kernel."""
    letters = map(chr, itertools.count(ord("A")))
    avals: Any = [var.aval for var in eqn.invars[:2]]
    lhs, rhs = ([next(letters) for _ in aval.shape] for aval in avals)
    contracted, batched = eqn.params["dimension_numbers"]
    for left, right in (*zip(*contracted, strict=True), *zip(*batched, strict=True)):
        rhs[right] = lhs[left]
    out = [lhs[axis] for axis in batched[0]]
    out += [letter for letter in lhs if letter not in rhs] + [letter for letter in rhs if letter not in lhs]
    kernel, other = (rhs, lhs) if which == 1 else (lhs, rhs)
    stored = [kernel[perm.index(axis)] for axis in range(len(perm))]
    return f"{''.join(other)},{''.join(stored)}->{''.join(out)}"


def _high_precision_dot(eqn: Any, recipe: Recipe, ins: list[Any]) -> jax.Array:
    """A dot product in the recipe's high-precision format, forward and backward."""
    dtype, (lhs, rhs, *rest) = formats.get(recipe.gemm).dtype, map(untracked, ins)
    params = dict(eqn.params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = dtype
    out = eqn.primitive.bind(lhs.astype(dtype), rhs.astype(dtype), *rest, **params)
    return checkpoint_name(out.astype(eqn.outvars[0].aval.dtype), OUTPUT)


def _states_inside(plan: Plan, states: States, site: Site) -> dict[tuple[str, ...], Any]:
    """The states of the dot products inside the equation at a site; of a plan of calls alone, all states."""
    if not plan.dots:
        return dict(states)
    keys = {each.key for at, each in plan.dots.items() if at[: len(site)] == site}
    return {key: states[key] for key in keys if key in states}


def _call(plan: Plan, eqn: jex.JaxprEqn, ins: list[Any], states: States, site: Site) -> list[Any]:
    return _run(plan, *inner_jaxpr(eqn), ins, states, site)


def _remat(plan: Plan, eqn: jex.JaxprEqn, ins: list[Any], states: States, site: Site) -> list[Any]:
    def run(ins: Any, states: Any) -> list[Any]:
        return evaluate(plan, *inner_jaxpr(eqn), ins, states, site)

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **options)(ins, _states_inside(plan, states, site))


def _scan(plan: Plan, eqn: jex.JaxprEqn, ins: list[Any], states: States, site: Site) -> list[Any]:
    params, (jaxpr, jaxpr_consts) = eqn.params, inner_jaxpr(eqn)
    consts, carry, xs = scan_parts(eqn, ins)
    carry = [untracked(x) for x in carry]
    xs = [_layers(x, site, params["length"]) if isinstance(x, Tracked) else x for x in xs]
    # A kernel without stacked states shares its state between the layers.
    sliced = (dot for dot in plan.dots.values() if any(at == site for at, _ in dot.dot.loops))
    stacked = {dot.key: states[dot.key] for dot in sliced if states.get(dot.key, _NO_STATE).depth(dot.kernel)}

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        xs, of_layer = x
        ins = [*consts, *carry, *xs]
        outs = evaluate(plan, jaxpr, jaxpr_consts, ins, {**states, **of_layer}, site)
        return outs[: len(carry)], outs[len(carry) :]

    names = ("length", "reverse", "unroll", "_split_transpose")
    options = {name: params[name] for name in names if name in params}
    carry, ys = lax.scan(body, carry, (xs, stacked), **options)
    return [*carry, *ys]


def _layers(x: Tracked, site: Site, length: int) -> Any:
    """A stacked parameter as the scanned input of a scan, with its layers first and a scale for each."""
    view, ndim = x.view.in_scan(site, length), x.weight.ndim
    shard: Any = x.weight.shard
    # Layers that are sharded themselves, as those of a vector for each layer, are gathered here.
    if view is None or (shard is not None and shard.axis % ndim == x.view.perm[0]):
        return x.value()
    order = (x.view.perm[0], *(axis for axis in range(ndim) if axis != x.view.perm[0]))
    stored, slot = (transpose(each, order) for each in (x.weight.value, x.weight.grad_slot))
    if shard is not None:
        shard = dataclasses.replace(shard, axis=order.index(shard.axis % ndim) - ndim)
    if hasattr(stored, "scale") and (not stored.scale.ndim or stored.scale.shape[0] != length):
        scale = jax.numpy.broadcast_to(stored.scale, (length, *stored.scale.shape[1:]))
        stored = ScaledArray(stored.data, scale)
    return Tracked(Weight(stored, slot, shard), view)


def _cond(plan: Plan, eqn: jex.JaxprEqn, ins: list[Any], states: States, site: Site) -> list[Any]:
    def branch(number: int, closed: Any) -> Any:
        def run(operands: Any, states: Any) -> list[Any]:
            return evaluate(plan, closed.jaxpr, closed.consts, operands, states, (*site, number))

        return run

    index, *operands = ins
    branches = [branch(*pair) for pair in enumerate(eqn.params["branches"])]
    return lax.switch(index, branches, operands, _states_inside(plan, states, site))


def _shard_map(plan: Plan, eqn: jex.JaxprEqn, ins: list[Any], states: States, site: Site) -> list[Any]:
    params, (jaxpr, consts) = eqn.params, inner_jaxpr(eqn)
    copies, specs = _copies_on_each(plan, params, states, site)

    def on_each(copies: Any, *ins: Any) -> tuple[Any, ...]:
        own = {key: states[key]._replace(scaling=jax.tree.map(first_state, x)) for key, x in copies.items()}
        return tuple(evaluate(plan, jaxpr, consts, ins, {**states, **own}, site))

    options = {name: params[name] for name in ("mesh", "out_specs", "check_vma")}
    in_specs = (specs, *params["in_specs"])
    run = jax.shard_map(on_each, in_specs=in_specs, axis_names=params["newly_manual_axes"], **options)
    return list(run(copies, *map(untracked, ins)))


def _copies_on_each(plan: Plan, params: Any, states: States, site: Site) -> tuple[Any, Any]:
    """Copies of the scaling states of the dot products inside of a `jax.shard_map`, by key, and their specs.

    A device has a copy of its own, and JAX's derivative of the copies merges the next states by max. A copy
    varies over the mesh axes that the dot product's output varies over, or JAX refuses the output's spec.
    """
    copies, specs, axes = {}, {}, params["newly_manual_axes"]
    for at, each in plan.dots.items():
        state = states.get(each.key, _NO_STATE).scaling
        if at[: len(site)] == site and state:
            over = tuple(x for x in params["mesh"].axis_names if x in axes)
            if params["check_vma"]:
                over = tuple(x for x in over if x in each.dot.varies)
            count = math.prod(params["mesh"].shape[x] for x in over)
            copies[each.key], specs[each.key] = state_copies(state, count), P(over)
    if AxisType.Explicit in params["mesh"].axis_types:
        copies = {key: jax.sharding.reshard(x, specs[key]) for key, x in copies.items()}
    return copies, specs


# How to evaluate the equations with planned dot products inside.
_INSIDE = {
    "scan": _scan,
    "cond": _cond,
    SHARD_MAP: _shard_map,
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(REMATS, _remat),
}
