"""Gradient checkpointing (remat) of a model's blocks: the choice of blocks and of their saved residuals.

    transform(model, recipe, gradient_checkpointing="fp8")
    transform(model, recipe, gradient_checkpointing="full", checkpoint_blocks=["EncoderLayer", "decoder/*"])

| setting | saved per block, besides its inputs |
|---|---|
| `full` | nothing |
| `fp8` | the FP8 operands of its dots, see `fp8jax.dot.save_fp8_operands` |
| `dots` | the outputs of its layers' dots |

Without `checkpoint_blocks` the blocks are the outermost repeated modules in the tree of the model's calls:
siblings of one class with layers, or the module of a scan's body; otherwise a module that is called more than
once. The blocks of a function without modules are the bodies of its scans.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from fp8jax.dot import save_fp8_operands
from fp8jax.recipe import Recipe
from fp8jax.rewrite.dots import Dot, Site
from fp8jax.rewrite.plan import REMATS, Found, inner_jaxprs
from fp8jax.rewrite.rules import Rule, Rules, matches

# The `checkpoint_name` of the outputs of kernels' dot products.
PRODUCT = "fp8jax_product"

# Named scope of a call, followed by the call's number and trace count.
_CALL = "fp8jax_call:"

_policies = jax.checkpoint_policies

POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    # FP8 dots by name, because a policy does not see their `dot_general`; high-precision dots by primitive.
    "dots": _policies.save_from_both_policies(
        _policies.save_only_these_names(PRODUCT), _policies.dots_with_no_batch_dims_saveable
    ),
    "fp8": save_fp8_operands,
}


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """The remat policy and the blocks it applies to.

    Attributes:
        keep: one of `POLICIES`.
        blocks: class names or path patterns, see `Rule`; None to find the blocks.
    """

    keep: str
    blocks: tuple[str, ...] | None = None

    @property
    def policy(self) -> Any:
        """The policy for `jax.checkpoint`."""
        return POLICIES[self.keep]


def checkpointing(
    keep: str, blocks: Iterable[str] | str | None, recipe: Recipe, rules: tuple[Rule, ...]
) -> Checkpointing | None:
    """The remat arguments of `fp8jax.transform` as one value; None for "none".

    Raises:
        ValueError: an argument is unknown, or the arguments contradict each other.
        TypeError: `blocks` are not strings.
    """
    if keep != "none" and keep not in POLICIES:
        raise ValueError(f"`gradient_checkpointing`: expected none, {', '.join(POLICIES)}; got {keep!r}.")
    if keep == "none":
        if blocks is not None:
            raise ValueError("`checkpoint_blocks`: expected with `gradient_checkpointing`, which is none.")
        return None
    if keep == "fp8" and all(each.gemm != "FP8" for each in (recipe, *Rules(recipe, rules).recipes)):
        raise ValueError(
            f"`gradient_checkpointing`: fp8 keeps FP8 operands, and gemm={recipe.gemm} has none; "
            "take dots or full, or a recipe whose GEMMs are FP8."
        )
    if blocks is None:
        return Checkpointing(keep)
    names = (blocks,) if isinstance(blocks, str) or not isinstance(blocks, Iterable) else tuple(blocks)
    if not names or not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"`checkpoint_blocks`: expected names of classes or patterns of paths; got {blocks!r}."
        )
    return Checkpointing(keep, names)


@dataclasses.dataclass(eq=False)
class Call:
    """All calls of one module by one parent call.

    Attributes:
        path, kind: the module's path and class name.
        number: the call's number in named scopes.
        nesting: the number of enclosing calls with the same path, as a scan and its body have.
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
    nesting: int = 0
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


class Calls:
    """The tree of a model's calls, recorded while it is traced."""

    def __init__(self) -> None:
        self.all = [Call("", "")]
        self._active = [self.all[0]]

    @contextlib.contextmanager
    def recorded(self, path: str, kind: str) -> Iterator[None]:
        """A context for tracing a call of the module at `path`."""
        nesting = sum(call.path == path for call in self._active[1:])
        # A scan's body is traced more than once.
        found = [call for call in self._active[-1].below if (call.path, call.nesting) == (path, nesting)]
        if found:
            found[0].times += 1
        else:
            found = [Call(path, kind, len(self.all), nesting)]
            self._active[-1].below.append(found[0])
            self.all.append(found[0])
        self._active.append(found[0])
        try:
            with jax.named_scope(f"{_CALL}{found[0].number}.{found[0].times}"):
                yield
        finally:
            self._active.pop()

    def see(self, jaxpr: Any, dots: Iterable[Dot]) -> None:
        """Records the dot products, loops and checkpoints of each call.

        Args:
            jaxpr: the model's jaxpr.
            dots: the dot products of parameters.
        """
        counts = collections.Counter(calls[-1] for dot in dots if (calls := calls_in(dot.scope)))
        for (number, _), count in counts.items():
            self.all[number].dots = max(self.all[number].dots, count)
        self._see_loops(jaxpr, {dot.site for dot in dots}, (), ())

    def _see_loops(self, jaxpr: Any, dots: set[Site], at: Site, around: tuple[Any, ...]) -> None:
        """Records for each call the loops and checkpoints around its operations.

        Args:
            jaxpr: the jaxpr to walk.
            dots: sites of the dot products of parameters.
            at: site of the jaxpr.
            around: numbers of the enclosing calls and names of the enclosing primitives, outermost first.
        """
        for position, eqn in enumerate(jaxpr.eqns):
            site = (*at, position)
            name = eqn.primitive.name
            numbers = (number for number, _ in calls_in(str(eqn.source_info.name_stack)))
            here = (*around, *(number for number in numbers if number not in around))
            for index, each in enumerate(here):
                if isinstance(each, int):
                    self.all[each].in_loop |= "scan" in here[:index]
                    self.all[each].in_scan |= index > 0 and "scan" in _since_call(here[:index])
            if site in dots and {*REMATS} & {*here}:
                for each in here:
                    if isinstance(each, int):
                        self.all[each].rematerializes = True
            inner = (*here, name) if name == "scan" or name in REMATS else here
            for more, below in inner_jaxprs(eqn):
                self._see_loops(below, dots, (*site, *more), inner)


class Remat(NamedTuple):
    """The groups of equations of a jaxpr to rematerialize."""

    calls: dict[int, bool]  # number of each call to rematerialize -> whether it is inside a loop
    scans: frozenset[Site]  # scans with a body to rematerialize
    inside: frozenset[Site]  # equations with such a call or scan in their inner jaxprs
    policy: Any

    def call_of(self, eqn: Any) -> tuple[int, int] | None:
        """The call that an equation is rematerialized with, or None."""
        if not self.calls:
            return None
        found = (call for call in calls_in(str(eqn.source_info.name_stack)) if call[0] in self.calls)
        return next(found, None)


def remat_of(setting: Checkpointing, calls: Calls, jaxpr: Any, found: Found) -> tuple[Remat, list[Call]]:
    """The equations of a traced function to rematerialize, and the blocks that are calls of modules.

    Raises:
        ValueError: see `choose`.
    """
    kernels = [dot for dot in found.dots if dot.path]
    calls.see(jaxpr, kernels)
    scans: set[Site] = set()
    if len(calls.all) > 1:
        blocks = choose(calls.all[0], setting)
    else:
        blocks = []
        scans = {dot.loops[-1][0] for dot in kernels if dot.loops}
        if not scans:
            raise ValueError(
                "`gradient_checkpointing`: expected a function that scans stacked parameters; got one "
                "without. In its own code use jax.checkpoint with a policy, e.g. fp8jax.dot.save_fp8_operands."
            )
    remat = Remat(
        {call.number: call.in_loop for call in blocks}, frozenset(scans), frozenset(), setting.policy
    )
    inside = {site[:n] for site in scans for n in range(1, len(site))}
    _add_sites(jaxpr, remat, (), inside)
    return remat._replace(inside=frozenset(inside)), blocks


def _add_sites(jaxpr: Any, remat: Remat, at: Site, inside: set[Site]) -> bool:
    """Adds the sites of equations with inner jaxprs that have something to rematerialize."""
    is_found = False
    for number, eqn in enumerate(jaxpr.eqns):
        site = (*at, number)
        if remat.call_of(eqn) is not None:
            is_found = True
        elif any([_add_sites(inner, remat, (*site, *more), inside) for more, inner in inner_jaxprs(eqn)]):
            inside.add(site)
            is_found = True
    return is_found


def calls_in(scope: str) -> list[tuple[int, int]]:
    """(number, trace count) of each call around an operation with these named scopes, outermost first."""
    return [(int(number), int(time)) for number, time in re.findall(rf"{_CALL}(\d+)\.(\d+)", scope)]


def _since_call(around: tuple[Any, ...]) -> tuple[Any, ...]:
    """The primitives within the innermost call."""
    last = max((index for index, each in enumerate(around) if isinstance(each, int)), default=-1)
    return around[last + 1 :]


def choose(root: Call, setting: Checkpointing) -> list[Call]:
    """The calls to checkpoint.

    Raises:
        ValueError: there is none, a pattern matches none, or a call has a `jax.checkpoint` already.
    """
    blocks = list(_repeated(root) if setting.blocks is None else _named(root, setting.blocks))
    kinds = ", ".join(f"{call.path} ({call.kind})" for call in _modules(root)) or "none"
    for name in setting.blocks or ():
        if not any(_fits(name, call) for call in root.all_below() if call.holds_layers):
            raise ValueError(
                f"`checkpoint_blocks`: {name!r} matches no module that holds layers; they are {kinds}."
            )
    if not blocks:
        raise ValueError(
            "`gradient_checkpointing`: no module that holds layers repeats in this model, so there are no "
            f"blocks to find; name some with `checkpoint_blocks`. The modules that hold layers are {kinds}."
        )
    refuse_rematerialized(blocks)
    return blocks


def refuse_rematerialized(blocks: Iterable[Call]) -> None:
    """Raises ValueError if the model's code already rematerializes a block."""
    for call in blocks:
        if call.rematerializes:
            raise ValueError(
                f"`gradient_checkpointing`: the model's own code rematerializes {call.path!r} already, by "
                "nn.remat, nnx.remat or jax.checkpoint: with both its forward would run three times, and the "
                "outer one would decide what is kept. Take it out there, or set none here and give it a "
                "policy there, e.g. fp8jax.dot.save_fp8_operands."
            )


def lines(setting: Checkpointing | None, blocks: Iterable[Call]) -> list[str]:
    """The lines of the report."""
    if setting is None:
        return []
    unique = {call.path: f"{call.path} ({call.kind}{', scanned' if call.in_loop else ''})" for call in blocks}
    return [f"gradient_checkpointing={setting.keep}: of {', '.join(unique.values())}"]


def _modules(root: Call) -> list[Call]:
    unique = {(call.path, call.kind): call for call in root.all_below() if call.path and call.holds_layers}
    return list(unique.values())


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
