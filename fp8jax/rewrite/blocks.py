"""Which modules of a model are rematerialized, and what of them is kept for the backward.

    transform(model, recipe, gradient_checkpointing="fp8")
    transform(model, recipe, gradient_checkpointing="full", checkpoint_blocks=["EncoderLayer", "decoder/*"])

| setting | kept of a block, besides its inputs |
|---|---|
| `full` | nothing |
| `fp8` | the FP8 operands of its products, see `fp8jax.save_fp8_operands` |
| `dots` | the outputs of its layers' products |

A model is seen as a tree of calls. Blocks that nobody named are the outermost modules that repeat: siblings
of one class that hold layers, or what a scan goes over; else a module that is called again. Of a function
they are the bodies of its scans.
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
from fp8jax.rewrite.plan import REMATS, Dot, Found, Site, inner_jaxprs
from fp8jax.rewrite.rules import Rule, Rules, matches

# The name of a kernel's dot product to a policy of `jax.checkpoint`.
PRODUCT = "fp8jax_product"

# Operations of a call have its number and time behind this in their names.
_CALL = "fp8jax_call:"

_policies = jax.checkpoint_policies

POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    # By name, since a policy sees no `dot_general` in an FP8 product; those it sees are of layers left alone.
    "dots": _policies.save_from_both_policies(
        _policies.save_only_these_names(PRODUCT), _policies.dots_with_no_batch_dims_saveable
    ),
    "fp8": save_fp8_operands,
}


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """What is kept of which blocks.

    Attributes:
        keep: one of `POLICIES`.
        blocks: names of classes or patterns of paths, see `Rule`; None: found by itself.
    """

    keep: str
    blocks: tuple[str, ...] | None = None

    @property
    def policy(self) -> Any:
        """As `jax.checkpoint` takes it."""
        return POLICIES[self.keep]


def checkpointing(
    keep: str, blocks: Iterable[str] | str | None, recipe: Recipe, rules: tuple[Rule, ...]
) -> Checkpointing | None:
    """The settings of `fp8jax.transform` as one value; None for "none".

    Raises:
        ValueError: they are unknown or contradict each other.
        TypeError: `blocks` are no strings.
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
    """The calls of one module from within one call.

    Attributes:
        path, kind: of the module: its path, its class's name.
        number: of the call, in the names of its operations.
        nesting: how many calls around it have the same path, as a scan's body has its scan's.
        dots: how many dot products of parameters its own code makes, each time.
        in_scan: whether a scan stands between it and the call around it, and any around it.
        in_loop: whether any scan stands around it.
        times: how often it was traced.
        rematerializes: whether dot products are in a `jax.checkpoint` of the model's own, within it or
            around it.
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
        """Whether there are layers within it, or several dot products of its own."""
        return self.dots > 1 or any(call.dots for call in self.all_below())

    def all_below(self) -> Iterator["Call"]:
        """Every call within it, the outer ones first."""
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
        """While it lasts, a call of the module at `path` is traced."""
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
        """Notes of each call what is in it.

        Args:
            jaxpr: of the model.
            dots: the dot products of parameters.
        """
        counts = collections.Counter(calls[-1] for dot in dots if (calls := calls_in(dot.scope)))
        for (number, _), count in counts.items():
            self.all[number].dots = max(self.all[number].dots, count)
        self._see_loops(jaxpr, {dot.site for dot in dots}, (), ())

    def _see_loops(self, jaxpr: Any, dots: set[Site], at: Site, around: tuple[Any, ...]) -> None:
        """Notes of each call which loops and checkpoints its operations are in.

        Args:
            jaxpr: whose operations.
            dots: sites of the dot products of parameters.
            at: site of the jaxpr.
            around: numbers of the calls, and names of the primitives, that they are in, the outermost first.
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
    """Which equations of a jaxpr are rematerialized together."""

    calls: dict[int, bool]  # numbers of calls, and whether a loop is around them
    scans: frozenset[Site]  # whose bodies are
    inside: frozenset[Site]  # of equations whose inner jaxprs have some
    policy: Any

    def call_of(self, eqn: Any) -> tuple[int, int] | None:
        """The call that an equation is rematerialized with."""
        if not self.calls:
            return None
        found = (call for call in calls_in(str(eqn.source_info.name_stack)) if call[0] in self.calls)
        return next(found, None)


def remat_of(setting: Checkpointing, calls: Calls, jaxpr: Any, found: Found) -> tuple[Remat, list[Call]]:
    """What is rematerialized of a traced function, and its blocks that are calls of modules.

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
                "without. In its own code use jax.checkpoint with a policy, e.g. fp8jax.save_fp8_operands."
            )
    remat = Remat(
        {call.number: call.in_loop for call in blocks}, frozenset(scans), frozenset(), setting.policy
    )
    inside = {site[:n] for site in scans for n in range(1, len(site))}
    _add_sites(jaxpr, remat, (), inside)
    return remat._replace(inside=frozenset(inside)), blocks


def _add_sites(jaxpr: Any, remat: Remat, at: Site, inside: set[Site]) -> bool:
    """Adds the sites of equations in whose inner jaxprs there is something to rematerialize."""
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
    """The calls that an operation with these name scopes is in, each by its number and how often it was
    traced, the outermost first."""
    return [(int(number), int(time)) for number, time in re.findall(rf"{_CALL}(\d+)\.(\d+)", scope)]


def _since_call(around: tuple[Any, ...]) -> tuple[Any, ...]:
    """The primitives within the innermost call."""
    last = max((index for index, each in enumerate(around) if isinstance(each, int)), default=-1)
    return around[last + 1 :]


def choose(root: Call, setting: Checkpointing) -> list[Call]:
    """The calls that are checkpointed.

    Raises:
        ValueError: there are none, a pattern matches none, or one is a layer or rematerializes already.
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
    """Raises ValueError if the model's own code rematerializes one."""
    for call in blocks:
        if call.rematerializes:
            raise ValueError(
                f"`gradient_checkpointing`: the model's own code rematerializes {call.path!r} already, by "
                "nn.remat, nnx.remat or jax.checkpoint: with both its forward would run three times, and the "
                "outer one would decide what is kept. Take it out there, or set none here and give it a "
                "policy there, e.g. fp8jax.save_fp8_operands."
            )


def lines(setting: Checkpointing | None, blocks: Iterable[Call]) -> list[str]:
    """What a report says."""
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
