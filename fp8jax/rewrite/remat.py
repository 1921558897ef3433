"""Gradient checkpointing (remat) of a model's blocks: which blocks, and which residuals they save.

    transform(model, recipe, gradient_checkpointing="fp8")
    transform(model, recipe, gradient_checkpointing="full", checkpoint_blocks=["EncoderLayer", "decoder/*"])

| setting | saved per block, besides its inputs |
|---|---|
| `full` | nothing |
| `fp8` | the FP8 operands of its dots, see `fp8jax.dot.save_fp8_operands` |
| `dots` | the outputs of its layers' dots |
| `dots_fp8` | the same in FP8; all else is computed from the rounded outputs, see `fp8jax.dot.through_fp8` |
| `dots_fp8_inputs` | the same, and the block's input (the residual stream) in FP8, too |

Without `checkpoint_blocks` the blocks are the outermost repeated modules in the tree of the model's calls:
siblings of one class with layers, or the module of a scan's body; otherwise a module that is called more than
once. The blocks of a function without modules are the bodies of its scans.
"""

import collections
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from fp8jax.dot import OUTPUT, OUTPUT_CODES, save_fp8_operands, through_fp8
from fp8jax.recipe import Recipe
from fp8jax.rewrite.dots import Dot, Site
from fp8jax.rewrite.find import CALLS, CHECKPOINT, REMATS, SCAN, scan_parts
from fp8jax.rewrite.rules import Rule, Rules, matches

# Named scope of a call, followed by the call's number and trace count.
_CALL = "fp8jax_call:"

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
            f"`gradient_checkpointing`: fp8 keeps FP8 operands, and gemm={recipe.gemm} has none; "
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


# The calls of modules ############################################################################


@dataclasses.dataclass(eq=False)
class Call:
    """All calls of one module by one parent call.

    Attributes:
        path, kind: the module's path and class name.
        number: the call's number in named scopes.
        dots: the number of parameters' dot products outside submodules, per call.
        in_scan: whether a scan is between the call and its parent call.
        in_loop: whether the call is inside a scan.
        times: how often the module was traced.
        rematerializes: whether its dot products are in a `jax.checkpoint` of the model's code.
        below: the calls of submodules.
    """

    path: str
    kind: str
    number: int = 0
    dots: int = 0
    in_scan: bool = False
    in_loop: bool = False
    times: int = 1
    rematerializes: bool = False
    below: list["Call"] = dataclasses.field(default_factory=list)

    @property
    def holds_layers(self) -> bool:
        """Whether submodules have dot products, or the module itself has more than one."""
        return self.dots > 1 or any(call.dots for call in self.all_below())

    def all_below(self) -> Iterator["Call"]:
        """All calls inside this call, outer calls first."""
        for call in self.below:
            yield call
            yield from call.all_below()

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}{', scanned' if self.in_loop else ''})"


class Calls:
    """The tree of a model's calls, recorded while it is traced."""

    def __init__(self) -> None:
        self.all = [Call("", "")]
        self._active = [self.all[0]]

    @contextlib.contextmanager
    def recorded(self, path: str, kind: str) -> Iterator[None]:
        """A context for tracing a call of the module at `path`."""
        siblings = self._active[-1].below
        call = next((call for call in siblings if call.path == path), None)
        if call is None:
            call = Call(path, kind, len(self.all))
            siblings.append(call)
            self.all.append(call)
        else:
            call.times += 1  # a scan's body is traced more than once
        self._active.append(call)
        try:
            with jax.named_scope(f"{_CALL}{call.number}.{call.times}"):
                yield
        finally:
            self._active.pop()

    def record_dots(self, dots: Iterable[Dot]) -> None:
        """Records the dot products of parameters in each call, and the loops and checkpoints around them."""
        counts: collections.Counter[tuple[int, int]] = collections.Counter()
        for dot in dots:
            around, in_scan, in_loop, innermost = [], False, False, None
            for scope in dot.place.scopes:
                in_scan, in_loop = in_scan or scope == SCAN, in_loop or scope == SCAN
                for innermost in _calls_in(scope):
                    call = self.all[innermost[0]]
                    if call not in around:
                        around.append(call)
                        call.in_scan |= in_scan
                        call.in_loop |= in_loop
                        in_scan = False
            for call in around:
                call.rematerializes |= CHECKPOINT in dot.place.scopes
            counts.update([innermost] if innermost else [])
        for (number, _), count in counts.items():
            self.all[number].dots = max(self.all[number].dots, count)


def _calls_in(scope: str) -> list[tuple[int, int]]:
    """(number, trace count) of each call around an operation with this named scope, outermost first."""
    return [(int(number), int(time)) for number, time in re.findall(rf"{_CALL}(\d+)\.(\d+)", scope)]


# The choice of blocks ############################################################################


def find_blocks(root: Call, names: tuple[str, ...] | None) -> list[Call]:
    """The calls to checkpoint, of modules with these class names or path patterns; None for repeated modules.

    Raises:
        ValueError: there is none, a pattern matches none, or a call has a `jax.checkpoint` already.
    """
    blocks = list(_repeated(root) if names is None else _named(root, names))
    holders = [call for call in root.all_below() if call.holds_layers]
    # Each path and class once, in order.
    kinds = ", ".join({f"{call.path} ({call.kind})": None for call in holders if call.path}) or "none"
    for name in names or ():
        if not any(_fits(name, call) for call in holders):
            raise ValueError(
                f"`checkpoint_blocks`: {name!r} matches no module that holds layers; they are {kinds}."
            )
    if not blocks:
        raise ValueError(
            "`gradient_checkpointing`: no module that holds layers repeats in this model, so there are no "
            f"blocks to find; name some with `checkpoint_blocks`. The modules that hold layers are {kinds}."
        )
    for call in blocks:
        if call.rematerializes:
            raise ValueError(
                f"`gradient_checkpointing`: the model's own code rematerializes {call.path!r} already, by "
                "nn.remat, nnx.remat or jax.checkpoint: with both, its forward runs three times, and "
                "the outer policy decides what is saved. Take it out there, or set none here and give it a "
                "policy there, e.g. fp8jax.dot.save_fp8_operands."
            )
    return blocks


def _repeated(root: Call) -> Iterator[Call]:
    held = [call for call in root.below if call.holds_layers]
    for call in held:
        alike = {other.path for other in held if other.kind == call.kind}
        is_scan = any(inner.in_scan for inner in call.below)
        if call.in_scan or (len(alike) > 1 and not is_scan):
            yield call
        else:
            within = list(_repeated(call))
            yield from within or ([call] if call.path and call.times > 1 else [])


def _named(root: Call, names: tuple[str, ...]) -> Iterator[Call]:
    for call in root.below:
        is_scan = any(inner.in_scan and inner.path == call.path for inner in call.below)
        if call.path and call.holds_layers and not is_scan and any(_fits(name, call) for name in names):
            yield call
        else:
            yield from _named(call, names)


def _fits(name: str, call: Call) -> bool:
    return name == call.kind or matches(name, call.path)


# The checkpoints of a program #####################################################################

# Numbers of calls, or sites of scans with bodies to checkpoint; and whether the block is inside a loop.
_Blocks = Mapping[int | Site, bool]


def with_checkpoints(
    jaxpr: jex.Jaxpr, setting: Checkpointing, calls: Calls, dots: Iterable[Dot]
) -> tuple[jex.Jaxpr, str]:
    """A traced function's jaxpr with a `jax.checkpoint` around each block, and a line for the report.

    Args:
        jaxpr: the function's jaxpr.
        setting: the policy and the blocks.
        calls: the calls of modules, recorded while the function was traced.
        dots: the dot products of parameters in the function's jaxpr.

    Raises:
        ValueError: see `find_blocks`; or a function without modules scans no stacked parameters.
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
    note = f"gradient_checkpointing={setting.policy}: of {', '.join(names)}"
    if setting.policy.startswith("dots_fp8"):
        jaxpr = _through_fp8(jaxpr, frozenset(dot.place.site for dot in dots if _is_in(dot, blocks)), ())
    return _checkpointed(jaxpr, setting.policy, blocks, ()), note


def _is_in(dot: Dot, blocks: _Blocks) -> bool:
    calls = [number for scope in dot.place.scopes for number, _ in _calls_in(scope)]
    return any(key in blocks for key in (*calls, *(site for site, _ in dot.loops[-1:])))


def _through_fp8(jaxpr: jex.Jaxpr, dots: frozenset[Site], site: Site) -> jex.Jaxpr:
    """The jaxpr at a site with the outputs of these dots through FP8. Each dot becomes a call of the dot and
    the rounding, so that the sites of other equations stay."""

    def rounded(eqn: jex.JaxprEqn, at: Site) -> jex.JaxprEqn:
        if at in dots:
            return _called_through_fp8(eqn)
        return _with_inner(eqn, at, lambda inner, below: _through_fp8(inner, dots, below))

    eqns = [rounded(eqn, (*site, number)) for number, eqn in enumerate(jaxpr.eqns)]
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _called_through_fp8(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """A call of a dot whose output goes through FP8."""
    closed = jax.make_jaxpr(jax.jit(lambda *args: through_fp8(eqn.primitive.bind(*args, **eqn.params))))(
        *(var.aval for var in eqn.invars)
    )
    [call] = closed.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _checkpointed(
    jaxpr: jex.Jaxpr, policy: str, blocks: _Blocks, site: Site, carry: Iterable[Any] = ()
) -> jex.Jaxpr:
    """The jaxpr at a site with a checkpoint around each block; the same object if it has none.

    `carry` are the inputs that a scan carries.
    """

    def block_of(eqn: jex.JaxprEqn) -> tuple[int, int] | None:
        calls = _calls_in(str(eqn.source_info.name_stack))
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
