"""A jaxpr, evaluated with some of its dot products in FP8.

All other equations are bound as they are, calls and loops without an FP8 dot product inside too.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

# There is no public way to give an equation that is bound again its old name and traceback.
from jax._src import source_info_util
from jax.ad_checkpoint import checkpoint_name

from fp8jax import formats
from fp8jax.dot import dot_general, ragged_dot
from fp8jax.platforms import explicit_mesh
from fp8jax.recipe import Recipe
from fp8jax.rewrite.follow import Tracked, Way, follow, moved, plain, sliced
from fp8jax.rewrite.plan import INNER, PROGRAM, REMATS, Chosen, Plan, Site, scan_parts

# The name of a kernel's dot product to a policy of `jax.checkpoint`.
PRODUCT = "fp8jax_product"

States = Mapping[tuple[str, ...], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """What does not change while a jaxpr is evaluated."""

    plan: Plan
    backend: str


def evaluate(
    context: Context, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], states: States
) -> list[Any]:
    """The outputs of a jaxpr.

    Args:
        context: the plan, made for this jaxpr.
        jaxpr: of the function.
        consts: of the jaxpr.
        args: arrays, and a `Tracked` for each parameter.
        states: the scaling states of the plan's dot products, by key.
    """
    return [plain(x) for x in _run(context, jaxpr, consts, args, states, ())]


def _run(
    context: Context, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], states: States, site: Site
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jex.Literal) else env[var]

    last = _last_uses(jaxpr)
    for number, eqn in enumerate(jaxpr.eqns):
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
            outs = _outputs(context, eqn, [read(var) for var in eqn.invars], states, (*site, number))
        env.update(zip(eqn.outvars, outs, strict=True))
        for var in last.get(number, ()):
            env.pop(var, None)
    return [read(var) for var in jaxpr.outvars]


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """The variables that no equation after one needs: an eager call is to free them."""
    last: dict[Any, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        last.update({var: number for var in eqn.invars if not isinstance(var, jex.Literal)})
    kept = {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
    out: dict[int, list[Any]] = {}
    for var, number in last.items():
        if var not in kept:
            out.setdefault(number, []).append(var)
    return out


def _outputs(context: Context, eqn: Any, ins: list[Any], states: States, site: Site) -> Sequence[Any]:
    name = eqn.primitive.name
    chosen = context.plan.chosen.get(site)
    if chosen is not None:
        return [_dot(context, eqn, chosen, ins, states)]
    if name == PROGRAM:
        leaves, states, arrays, consts = eqn.params["treedef"].unflatten(ins)
        return eqn.params["program"].run(leaves, states, [plain(x) for x in arrays], consts)
    if site in context.plan.below:
        if name == "scan":
            return _scan(context, eqn, ins, states, site)
        if name == "cond":
            return _cond(context, eqn, ins, states, site)
        if name in INNER or name in REMATS:
            return _call(context, eqn, ins, states, site)
    if ins and isinstance(ins[0], Tracked) and follow(ins[0].way, eqn) is not None:
        outs = moved(ins[0], eqn, [plain(x) for x in ins[1:]])
        if outs is not None:
            return outs
    out = eqn.primitive.bind(*map(plain, ins), **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _dot(context: Context, eqn: Any, chosen: Chosen, ins: list[Any], states: States) -> jax.Array:
    """One dot product in FP8; its kernel is read as it is stored."""
    which, options = chosen.dot.kernel, {"recipe": chosen.recipe, "backend": context.backend}
    options |= {"state": states.get(chosen.key, {}), "out_dtype": eqn.outvars[0].aval.dtype}
    other, kernel = plain(ins[1 - which]), ins[which]
    if not isinstance(kernel, Tracked):
        kernel = Tracked(kernel, None, Way.of(chosen.dot.path or (), kernel.shape, kernel.dtype))
    if chosen.recipe.gemm != "FP8":
        return _wide_dot(eqn, chosen.recipe, [plain(x) for x in ins])
    if chosen.dot.groups:
        groups = kernel.kernel if kernel.way.perm == (0, 1, 2) else kernel.value()
        return checkpoint_name(ragged_dot(other, groups, plain(ins[2]), **options), PRODUCT)
    perm = kernel.way.perm
    contracted, batched = eqn.params["dimension_numbers"]
    stored_contracted, stored_batched = (
        tuple(perm[d] for d in dims[which]) for dims in (contracted, batched)
    )
    numbers = (
        (tuple(contracted[1 - which]), stored_contracted),
        (tuple(batched[1 - which]), stored_batched),
    )
    # The output: batch dims, those of the other operand, then the kernel's as they are stored.
    free = [axis for axis in perm if axis not in (*stored_contracted, *stored_batched)]
    batch, rows = len(stored_batched), other.ndim - len(stored_batched) - len(stored_contracted)
    of_kernel = [batch + rows + sorted(free).index(axis) for axis in free]
    of_other = list(range(batch, batch + rows))
    order = [*range(batch), *(of_kernel + of_other if which == 0 else of_other + of_kernel)]
    sharding = _permuted(eqn.params.get("out_sharding"), order, (other, kernel.stored))
    out = dot_general(other, kernel.kernel, numbers, out_sharding=sharding, **options)
    out = checkpoint_name(out, PRODUCT)
    return out if order == sorted(order) else out.transpose(order)


def _wide_dot(eqn: Any, recipe: Recipe, ins: list[Any]) -> jax.Array:
    """A dot product in a wider format, forward and backward."""
    dtype, (lhs, rhs, *rest) = formats.get(recipe.gemm).dtype, ins
    params = {**eqn.params, "preferred_element_type": dtype}
    out = eqn.primitive.bind(lhs.astype(dtype), rhs.astype(dtype), *rest, **params)
    return out.astype(eqn.outvars[0].aval.dtype)


def _permuted(sharding: Any, order: list[int], operands: Any) -> Any:
    """The sharding of an output before it is transposed to `order`."""
    if sharding is None or not explicit_mesh(operands):
        return sharding
    spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    before = [spec[order.index(axis)] for axis in range(len(order))]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*before))


def _used(context: Context, states: States, site: Site) -> dict[tuple[str, ...], Any]:
    """The states of the dot products below a call."""
    keys = {each.key for at, each in context.plan.chosen.items() if at[: len(site)] == site}
    return {key: states[key] for key in keys if key in states}


def _call(context: Context, eqn: Any, ins: list[Any], states: States, site: Site) -> list[Any]:
    inner = eqn.params[{**INNER, **REMATS}[eqn.primitive.name]]
    closed, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    if eqn.primitive.name in INNER:
        return _run(context, closed, consts, ins, states, site)

    def run(ins: Any, states: Any) -> list[Any]:
        return [plain(x) for x in _run(context, closed, consts, ins, states, site)]

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **options)(ins, _used(context, states, site))


def _scan(context: Context, eqn: Any, ins: list[Any], states: States, site: Site) -> list[Any]:
    params, closed = eqn.params, eqn.params["jaxpr"]
    consts, carry, xs = scan_parts(eqn, ins)
    carry = [plain(x) for x in carry]
    xs = [_stacked(x, site, params["length"]) if isinstance(x, Tracked) else x for x in xs]
    own = context.plan.sliced.get(site, frozenset())
    of_layers = {key: states[key] for key in own if key in states}

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        xs, of_layer = x
        inside = [*consts, *carry, *xs]
        outs = _run(context, closed.jaxpr, closed.consts, inside, {**states, **of_layer}, site)
        outs = [plain(x) for x in outs]
        return outs[: len(carry)], outs[len(carry) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    if "_split_transpose" in params:
        options["_split_transpose"] = params["_split_transpose"]
    carry, ys = lax.scan(body, carry, (xs, of_layers), **options)
    return [*carry, *ys]


def _stacked(x: Tracked, site: Site, length: int) -> Any:
    """A parameter as the scan that slices it takes it."""
    way = sliced(x, site, length)
    if way is None:
        return x.value()
    stored = x.stored
    if hasattr(stored, "scale") and (not stored.scale.ndim or stored.scale.shape[0] != length):
        scale = jax.numpy.broadcast_to(stored.scale, (length, *stored.scale.shape[1:]))
        stored = dataclasses.replace(stored, scale=scale)
    return Tracked(stored, x.slot, way, x.spread)


def _cond(context: Context, eqn: Any, ins: list[Any], states: States, site: Site) -> list[Any]:
    index, *operands = ins

    def branch(number: int, closed: Any) -> Any:
        def run(operands: Any, states: Any) -> list[Any]:
            outs = _run(context, closed.jaxpr, closed.consts, operands, states, (*site, number))
            return [plain(x) for x in outs]

        return run

    branches = [branch(*pair) for pair in enumerate(eqn.params["branches"])]
    return lax.switch(index, branches, operands, _used(context, states, site))
