"""Evaluation of a jaxpr with the planned dot products in FP8.

All other equations are bound unchanged, including calls and loops without an FP8 dot product.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax import lax

# No public API gives a rebound equation its original name stack and traceback.
from jax._src import source_info_util
from jax.ad_checkpoint import checkpoint_name

from fp8jax import formats
from fp8jax.dot import dot_general, ragged_dot
from fp8jax.dot.layout import Layout
from fp8jax.platforms import explicit_mesh
from fp8jax.quantization import ScaledArray
from fp8jax.recipe import Recipe
from fp8jax.rewrite import lora
from fp8jax.rewrite.blocks import PRODUCT, Remat
from fp8jax.rewrite.dots import Site
from fp8jax.rewrite.follow import Tracked, Way, follow, moved, plain, sliced
from fp8jax.rewrite.lora import A, without_adapters
from fp8jax.rewrite.plan import INNER, PROGRAM, REMATS, Chosen, Plan, scan_parts
from fp8jax.rewrite.report import scope
from fp8jax.rewrite.rules import layer_path

States = Mapping[tuple[str, ...], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """The settings of an evaluation."""

    plan: Plan
    backend: str
    lora_scale: float = 1.0  # alpha / rank
    remat: Remat | None = None


def evaluate(
    context: Context, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], states: States
) -> list[Any]:
    """The outputs of a jaxpr.

    Args:
        context: settings, with the plan of this jaxpr.
        jaxpr: the function's jaxpr.
        consts: constants of the jaxpr.
        args: arrays, and a `Tracked` for each parameter.
        states: the scaling states of the plan's dot products, by key.
    """
    return [plain(x) for x in _run(context, jaxpr, consts, args, states, ())]


def _run(
    context: Context,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    states: States,
    site: Site,
    first: int = 0,  # index of the first equation
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, jex.Literal) else env[var]

    last = _last_uses(jaxpr)
    for call, numbers in _grouped(context.remat, jaxpr.eqns):
        if call is None or context.remat is None:
            [number] = numbers
            eqn = jaxpr.eqns[number]
            names = source_info_util.current_name_stack() + eqn.source_info.name_stack
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
                outs = _outputs(
                    context, eqn, [read(var) for var in eqn.invars], states, (*site, first + number)
                )
            env.update(zip(eqn.outvars, outs, strict=True))
        else:
            _run_block(context, jaxpr, numbers, env, states, site, is_in_loop=context.remat.calls[call[0]])
        for var in (var for number in numbers for var in last.get(number, ())):
            env.pop(var, None)
    return [read(var) for var in jaxpr.outvars]


def _grouped(remat: Remat | None, eqns: Sequence[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Groups of equation indices: a rematerialized call with all its equations, or None with one equation."""
    if remat is None:
        yield from ((None, [number]) for number in range(len(eqns)))
        return
    for call, group in itertools.groupby(enumerate(eqns), lambda pair: remat.call_of(pair[1])):
        numbers = [number for number, _ in group]
        yield from [(call, numbers)] if call is not None else ((None, [number]) for number in numbers)


class _Block(NamedTuple):
    """A part of a jaxpr, with the attributes that `_run` reads."""

    constvars: list[Any]
    invars: list[Any]
    outvars: list[Any]
    eqns: list[Any]


def _run_block(
    context: Context,
    jaxpr: Any,
    numbers: list[int],
    env: dict[Any, Any],
    states: States,
    site: Site,
    is_in_loop: bool,
) -> None:
    """Evaluates some equations under `jax.checkpoint` and adds their outputs to `env`."""
    assert context.remat is not None
    eqns = [jaxpr.eqns[number] for number in numbers]
    made = {var for eqn in eqns for var in eqn.outvars}
    read = {var for eqn in eqns for var in eqn.invars if not isinstance(var, jex.Literal)} - made
    later = [*jaxpr.outvars, *(var for eqn in jaxpr.eqns[numbers[-1] + 1 :] for var in eqn.invars)]
    needed = list({var: None for var in later if not isinstance(var, jex.Literal) and var in made})
    inputs = [var for var in env if var in read]
    inside = dataclasses.replace(context, remat=None)
    block = _Block([], inputs, needed, eqns)

    def run(values: Any, states: Any) -> list[Any]:
        return [plain(x) for x in _run(inside, block, [], values, states, site, numbers[0])]

    keys = {key for number in numbers for key in _used(context, states, (*site, number))}
    used = {key: states[key] for key in keys}
    checkpointed = jax.checkpoint(run, policy=context.remat.policy, prevent_cse=not is_in_loop)
    env.update(zip(needed, checkpointed([env[var] for var in inputs], used), strict=True))


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """For each equation, the variables that no later equation needs, so that an eager call frees them."""
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
        with scope(layer_path(chosen.dot.path or ())):
            return [_dot(context, eqn, chosen, ins, states)]
    if name == PROGRAM:
        leaves, states, arrays, consts = eqn.params["treedef"].unflatten(ins)
        states = {key: {name: plain(x) for name, x in kept.items()} for key, kept in states.items()}
        return eqn.params["program"].run(leaves, states, [plain(x) for x in arrays], consts)
    if site in context.plan.below or (context.remat and site in context.remat.inside):
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
    path = context.plan.named.get(site)
    with contextlib.nullcontext() if path is None else scope(layer_path(path)):
        out = eqn.primitive.bind(*map(plain, ins), **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _dot(context: Context, eqn: Any, chosen: Chosen, ins: list[Any], states: States) -> jax.Array:
    """One dot product under its recipe. The kernel is used in its storage format and axis order."""
    which, options = chosen.dot.kernel, {"recipe": chosen.recipe, "backend": context.backend}
    kept, is_fp8 = states.get(chosen.key, {}), chosen.recipe.gemm == "FP8"
    out_dtype = eqn.outvars[0].aval.dtype
    for _ in range(_depth(kept, chosen)):
        # One dot product of stacked kernels, as under `nnx.vmap`: all share the state of the first layer.
        kept = {name: lax.index_in_dim(x, 0, keepdims=False) for name, x in kept.items()}
    options |= {"state": without_adapters(kept), "out_dtype": out_dtype}
    other, kernel = plain(ins[1 - which]), ins[which]
    if not isinstance(kernel, Tracked):
        kernel = Tracked(kernel, None, Way.of(chosen.dot.path or (), kernel.shape, kernel.dtype))
    if not is_fp8 and A not in kept:
        return _wide_dot(eqn, chosen.recipe, [plain(x) for x in ins])
    if chosen.dot.groups:
        groups = kernel.kernel if kernel.way.perm == (0, 1, 2) else kernel.value()
        over = eqn.params.get("over")
        return checkpoint_name(ragged_dot(other, groups, plain(ins[2]), over=over, **options), PRODUCT)
    perm = kernel.way.perm
    contracted, batched = eqn.params["dimension_numbers"]
    stored_contracted, stored_batched = (
        tuple(perm[d] for d in dims[which]) for dims in (contracted, batched)
    )
    numbers = (
        (tuple(contracted[1 - which]), stored_contracted),
        (tuple(batched[1 - which]), stored_batched),
    )
    # Output axes: batch, free axes of the other operand, free axes of the kernel in storage order.
    free = [axis for axis in perm if axis not in (*stored_contracted, *stored_batched)]
    batch, rows = len(stored_batched), other.ndim - len(stored_batched) - len(stored_contracted)
    of_kernel = [batch + rows + sorted(free).index(axis) for axis in free]
    of_other = list(range(batch, batch + rows))
    order = [*range(batch), *(of_kernel + of_other if which == 0 else of_other + of_kernel)]
    sharding = _permuted(eqn.params.get("out_sharding"), order, (other, kernel.stored))
    if is_fp8:
        out = dot_general(other, kernel.kernel, numbers, out_sharding=sharding, **options)
        out = checkpoint_name(out, PRODUCT)
        out = out if order == sorted(order) else out.transpose(order)
    else:
        out = _wide_dot(eqn, chosen.recipe, [plain(x) for x in ins])
    if A not in kept:
        return out
    layout = Layout.of(other.shape, kernel.stored.shape, numbers)
    dtype = out_dtype if is_fp8 else formats.get(chosen.recipe.gemm).dtype
    return out + lora.product(context.lora_scale, layout, other, kept, dtype).astype(out_dtype).transpose(
        order
    )


def _wide_dot(eqn: Any, recipe: Recipe, ins: list[Any]) -> jax.Array:
    """A high-precision dot product, forward and backward."""
    dtype, (lhs, rhs, *rest) = formats.get(recipe.gemm).dtype, ins
    params = dict(eqn.params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = dtype
    out = eqn.primitive.bind(lhs.astype(dtype), rhs.astype(dtype), *rest, **params)
    return checkpoint_name(out.astype(eqn.outvars[0].aval.dtype), PRODUCT)


def _permuted(sharding: Any, order: list[int], operands: Any) -> Any:
    """The output sharding before the output is transposed to `order`."""
    if sharding is None or not explicit_mesh(operands):
        return sharding
    spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    before = [spec[order.index(axis)] for axis in range(len(order))]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*before))


def _used(context: Context, states: States, site: Site) -> dict[tuple[str, ...], Any]:
    """The states of the dot products inside a call."""
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
    kinds = {each.key: each for each in context.plan.chosen.values()}
    # A kernel without stacked states shares its state between the layers.
    of_layers = {key: states[key] for key in own if _depth(states.get(key, {}), kinds[key]) > 0}

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        xs, of_layer = x
        inside = [*consts, *carry, *xs]
        outs = _run(context, closed.jaxpr, closed.consts, inside, {**states, **of_layer}, site)
        outs = [plain(x) for x in outs]
        return outs[: len(carry)], outs[len(carry) :]

    if context.remat is not None and site in context.remat.scans:
        body = jax.checkpoint(body, policy=context.remat.policy, prevent_cse=False)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    if "_split_transpose" in params:
        options["_split_transpose"] = params["_split_transpose"]
    carry, ys = lax.scan(body, carry, (xs, of_layers), **options)
    return [*carry, *ys]


def _depth(state: Mapping[str, Any], chosen: Chosen) -> int:
    """The number of leading layer axes of a scaling state or of adapters."""
    groups = int(chosen.dot.groups > 0)
    ranks = {"scale": 1 + groups, "wgrad_scale": groups, A: 2}
    return next((state[name].ndim - rank for name, rank in ranks.items() if name in state), 0)


def _stacked(x: Tracked, site: Site, length: int) -> Any:
    """A stacked parameter as the scanned input of a scan, with a scale for each layer."""
    way = sliced(x, site, length)
    if way is None:
        return x.value()
    stored = x.stored
    if hasattr(stored, "scale") and (not stored.scale.ndim or stored.scale.shape[0] != length):
        scale = jax.numpy.broadcast_to(stored.scale, (length, *stored.scale.shape[1:]))
        stored = ScaledArray(stored.data, scale)
    return Tracked(stored, x.grad_slot, way, x.shard)


def _cond(context: Context, eqn: Any, ins: list[Any], states: States, site: Site) -> list[Any]:
    index, *operands = ins

    def branch(number: int, closed: Any) -> Any:
        def run(operands: Any, states: Any) -> list[Any]:
            outs = _run(context, closed.jaxpr, closed.consts, operands, states, (*site, number))
            return [plain(x) for x in outs]

        return run

    branches = [branch(*pair) for pair in enumerate(eqn.params["branches"])]
    return lax.switch(index, branches, operands, _used(context, states, site))
