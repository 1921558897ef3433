"""Policies of remat, and the passes over a jaxpr that apply them to the blocks of a model.

`checkpointing` gives the remat arguments of `fp8jax.transform` as one value. `with_checkpoints` puts a
`jax.checkpoint` around each block, and outputs of dots through FP8 where the policy saves them in FP8.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8jax.dot import OUTPUT, OUTPUT_CODES, save_fp8_operands, through_fp8
from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.dots import Dot, Site
from fp8jax.rewrite.interpreter.find import CALLS, CHECKPOINT, REMATS, scan_parts
from fp8jax.rewrite.remat.calls import Calls, calls_in, find_blocks
from fp8jax.rewrite.rules import Rule, Rules

_policies = jax.checkpoint_policies

POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    # FP8 dots by name, because a policy does not see their `dot_general`; high-precision dots by primitive.
    "dots": _policies.save_from_both_policies(
        _policies.save_only_these_names(OUTPUT), _policies.dots_with_no_batch_dims_saveable
    ),
    "dots_fp8": _policies.save_only_these_names(OUTPUT_CODES),
    "dots_fp8_inputs": _policies.save_only_these_names(OUTPUT_CODES),
    "fp8": save_fp8_operands,
}


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """The remat policy and the blocks it applies to.

    Attributes:
        policy: one of `POLICIES`.
        blocks: class names or path patterns, see `Rule`; None to find the blocks.
    """

    policy: str
    blocks: tuple[str, ...] | None = None


def checkpointing(
    policy: str, blocks: Iterable[str] | str | None, recipe: Recipe, rules: tuple[Rule, ...]
) -> Checkpointing | None:
    """The remat arguments of `fp8jax.transform` as one value; None for "none".

    Raises:
        ValueError: an argument is unknown, or the arguments contradict each other.
        TypeError: `blocks` are not strings.
    """
    if policy != "none" and policy not in POLICIES:
        raise ValueError(f"`gradient_checkpointing`: expected none, {', '.join(POLICIES)}; got {policy!r}.")
    if policy == "none":
        if blocks is not None:
            raise ValueError("`checkpoint_blocks`: expected with `gradient_checkpointing`, which is none.")
        return None
    if policy == "fp8" and all(not each.is_quantized for each in (recipe, *Rules(recipe, rules).recipes)):
        raise ValueError(
            f"`gradient_checkpointing`: fp8 saves FP8 operands, and gemm={recipe.gemm} has none; "
            "take dots or full, or a recipe whose GEMMs are FP8."
        )
    if blocks is None:
        return Checkpointing(policy)
    names = (blocks,) if isinstance(blocks, str) or not isinstance(blocks, Iterable) else tuple(blocks)
    if not names or not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"`checkpoint_blocks`: expected names of classes or patterns of paths; got {blocks!r}."
        )
    return Checkpointing(policy, names)


# Numbers of calls, or sites of scans with bodies to checkpoint; and whether the block is inside a loop.
_Blocks = Mapping[int | Site, bool]


def with_checkpoints(
    jaxpr: jex.Jaxpr, setting: Checkpointing, calls: Calls, dots: Iterable[Dot], precise: Iterable[Dot] = ()
) -> tuple[jex.Jaxpr, str]:
    """A traced function's jaxpr with a `jax.checkpoint` around each block, and a line for the report.

    Args:
        jaxpr: the function's jaxpr.
        setting: the policy and the blocks.
        calls: the calls of modules, recorded while the function was traced.
        dots: the dot products of parameters in the function's jaxpr.
        precise: those of them whose outputs are not rounded, of layers that the recipe leaves out.

    Raises:
        ValueError: see `find_blocks`; a function without modules scans no stacked parameters; or outputs of
            dots inside of a `jax.shard_map` would have to be rounded.
    """
    calls.record_dots(dots)
    blocks: dict[int | Site, bool] = {}
    names: dict[str, None] = {}  # an ordered set
    if len(calls.all) > 1:
        for call in find_blocks(calls.all[0], setting.blocks):
            blocks[call.number], names[str(call)] = call.in_loop, None
    else:
        blocks.update({dot.loops[-1][0]: True for dot in dots if dot.loops})
        if not blocks:
            raise ValueError(
                "`gradient_checkpointing`: expected a function that scans stacked parameters; got one "
                "without. Use jax.checkpoint in its code, with a policy such as "
                "fp8jax.dot.save_fp8_operands."
            )
    note = f"gradient_checkpointing={setting.policy}: of {', '.join(names) or 'the bodies of its scans'}"
    inside = [dot.place for dot in dots if _is_in(dot, blocks)]
    sites = frozenset(place.site for place in inside)
    if any(CHECKPOINT in place.scopes for place in inside):
        jaxpr = _without_remat(jaxpr, sites, ())
        note += ", in place of the model's own remat"
    if setting.policy.startswith("dots_fp8"):
        if on_each := [dot.layer for dot in dots if dot.place in inside and dot.place.is_on_each]:
            raise ValueError(
                f"`gradient_checkpointing`: expected no jax.shard_map around {on_each[0]!r} with "
                f"{setting.policy}, which does not see inside; got one. Take dots or fp8."
            )
        jaxpr = _through_fp8(jaxpr, sites, {dot.place.site for dot in precise}, ())
    return _checkpointed(jaxpr, setting.policy, blocks, ()), note


def _is_in(dot: Dot, blocks: _Blocks) -> bool:
    calls = [number for scope in dot.place.scopes for number, _ in calls_in(scope)]
    return any(key in blocks for key in (*calls, *(site for site, _ in dot.loops[-1:])))


def _without_remat(jaxpr: jex.Jaxpr, dots: frozenset[Site], site: Site) -> jex.Jaxpr:
    """The jaxpr at a site with a plain call in place of each checkpoint of the model's around these dots."""

    def changed(eqn: jex.JaxprEqn, at: Site) -> jex.JaxprEqn:
        new = _with_inner(eqn, at, lambda inner, below: _without_remat(inner, dots, below))
        if eqn.primitive.name not in REMATS or not any(dot[: len(at)] == at for dot in dots):
            return new
        inner = jex.ClosedJaxpr(new.params["jaxpr"], ())
        call = _call_of(jex.jaxpr_as_fun(inner), eqn)
        return call.replace(params={**call.params, "jaxpr": inner})

    return _with_equations(jaxpr, site, changed)


def _through_fp8(jaxpr: jex.Jaxpr, dots: frozenset[Site], precise: Collection[Site], site: Site) -> jex.Jaxpr:
    """The jaxpr at a site with the outputs of these dots through FP8, or named as they are. Each becomes a
    call of the dot and the rounding, so that the sites of other equations stay."""

    def rounded(eqn: jex.JaxprEqn, at: Site) -> jex.JaxprEqn:
        if at in dots:
            change = _named if at in precise else through_fp8
            return _call_of(lambda *args: change(eqn.primitive.bind(*args, **eqn.params)), eqn)
        return _with_inner(eqn, at, lambda inner, below: _through_fp8(inner, dots, precise, below))

    return _with_equations(jaxpr, site, rounded)


def _named(x: jax.Array) -> jax.Array:
    """An output that is saved as it is."""
    return checkpoint_name(x, OUTPUT_CODES)


def _with_equations(
    jaxpr: jex.Jaxpr, site: Site, change: Callable[[jex.JaxprEqn, Site], jex.JaxprEqn]
) -> jex.Jaxpr:
    """The jaxpr at a site with each equation changed; the same object without a change."""
    eqns = [change(eqn, (*site, number)) for number, eqn in enumerate(jaxpr.eqns)]
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _call_of(function: Callable[..., Any], eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """A call of a function in place of an equation."""
    [call] = jax.make_jaxpr(jax.jit(function))(*(var.aval for var in eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _checkpointed(
    jaxpr: jex.Jaxpr, policy: str, blocks: _Blocks, site: Site, carry: Iterable[Any] = ()
) -> jex.Jaxpr:
    """The jaxpr at a site with a checkpoint around each block; the same object if it has none.

    `carry` are the inputs that a scan carries.
    """

    def block_of(eqn: jex.JaxprEqn) -> tuple[int, int] | None:
        calls = calls_in(str(eqn.source_info.name_stack))
        return next((call for call in calls if call[0] in blocks), None)

    eqns: list[jex.JaxprEqn] = []
    end = 0
    for block, group in itertools.groupby(jaxpr.eqns, block_of):
        start, end = end, end + len(list(group))
        if block is None:
            pairs = enumerate(jaxpr.eqns[start:end], start)
            eqns += [_checkpointed_inside(eqn, policy, blocks, (*site, number)) for number, eqn in pairs]
        else:
            eqns.append(_checkpoint(jaxpr, start, end, policy, blocks[block[0]], carry))
    if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=False)):
        jaxpr = jaxpr.replace(eqns=eqns)
    if site in blocks:
        eqn = _checkpoint(jaxpr, 0, len(jaxpr.eqns), policy, blocks[site], carry)
        jaxpr = jaxpr.replace(eqns=[eqn])
    return jaxpr


def _checkpointed_inside(eqn: jex.JaxprEqn, policy: str, blocks: _Blocks, site: Site) -> jex.JaxprEqn:
    """The equation at a site, with a checkpoint around each block inside; the same object without one."""

    def change(inner: jex.Jaxpr, below: Site) -> jex.Jaxpr:
        carry = scan_parts(eqn, inner.invars)[1] if eqn.primitive.name == "scan" else []
        return _checkpointed(inner, policy, blocks, below, carry)

    return _with_inner(eqn, site, change)


def _with_inner(
    eqn: jex.JaxprEqn, site: Site, change: Callable[[jex.Jaxpr, Site], jex.Jaxpr]
) -> jex.JaxprEqn:
    """The equation at a site with each jaxpr inside changed; the same object without a change."""

    def inside(inner: Any, *branch: int) -> Any:
        jaxpr = getattr(inner, "jaxpr", inner)
        new = change(jaxpr, (*site, *branch))
        return inner if new is jaxpr else new if inner is jaxpr else inner.replace(jaxpr=new)

    if eqn.primitive.name not in ("scan", "cond", *CALLS, *REMATS):
        return eqn
    old = {key: eqn.params[key] for key in ("jaxpr", "call_jaxpr", "branches") if key in eqn.params}
    new = {
        key: tuple(inside(each, number) for number, each in enumerate(inner))
        if key == "branches"
        else inside(inner)
        for key, inner in old.items()
    }
    return eqn if new == old else eqn.replace(params={**eqn.params, **new})


def _checkpoint(
    jaxpr: jex.Jaxpr, start: int, end: int, policy: str, in_loop: bool, carry: Iterable[Any]
) -> jex.JaxprEqn:
    """Some equations of a jaxpr as a `jax.checkpoint`, with outputs that later equations need."""
    eqns = jaxpr.eqns[start:end]
    made = {var for eqn in eqns for var in eqn.outvars}
    used = (var for eqn in eqns for var in eqn.invars)
    used_later = [*jaxpr.outvars, *(var for eqn in jaxpr.eqns[end:] for var in eqn.invars)]
    ins = {var: None for var in used if not isinstance(var, jex.Literal) and var not in made}
    outs = {var: None for var in used_later if not isinstance(var, jex.Literal) and var in made}
    invars = [*ins]
    if policy == "dots_fp8_inputs":
        before = {*carry, *(var for eqn in jaxpr.eqns[:start] for var in eqn.outvars)}
        for number, var in enumerate(invars):
            if var in before and _is_stream(var, outs):
                # The rounded input takes the place of the input inside of the block.
                [rounding] = jax.make_jaxpr(jax.jit(through_fp8))(var.aval).eqns
                invars[number] = rounding.params["jaxpr"].jaxpr.invars[0]
                eqns = [rounding.replace(invars=[invars[number]], outvars=[var]), *eqns]
    # An equation of JAX's own, whose parameters are replaced.
    options = {"policy": POLICIES[policy], "prevent_cse": not in_loop}
    [eqn] = jax.make_jaxpr(jax.checkpoint(lambda: 0.0, **options))().eqns
    inner = jaxpr.replace(constvars=[], invars=invars, outvars=[*outs], eqns=eqns)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return eqn.replace(invars=[*ins], outvars=[*outs], params={**eqn.params, "jaxpr": inner}, effects=effects)


def _is_stream(var: Any, outs: Iterable[Any]) -> bool:
    """Whether an input of a block is its residual stream: floats in the shape of an output of the block."""
    of_var = (var.aval.shape, var.aval.dtype)
    is_float = jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.ndim > 1
    return is_float and any((out.aval.shape, out.aval.dtype) == of_var for out in outs)
