"""Which modules of a model are rematerialized, and what of them is kept for the backward.

    transform(model, recipe, gradient_checkpointing="fp8")
    transform(model, recipe, gradient_checkpointing="full", checkpoint_blocks=["EncoderLayer", "decoder/*"])

| setting | kept of a block, besides its inputs |
|---|---|
| `full` | nothing |
| `fp8` | the FP8 operands of its products, see `fp8jax.save_fp8_operands` |
| `dots` | the outputs of its layers' products |

A model is seen as a tree of calls. Blocks that nobody named are the outermost modules that repeat: siblings
of one class that hold layers, or what a scan goes over; else, in Linen, a module that is called again.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from fp8jax.dot import save_fp8_operands
from fp8jax.models.multiply import PRODUCT
from fp8jax.recipe import Recipe
from fp8jax.rewrite.rules import Rule, Rules, matches

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
    """One call of a module, or in NNX the module.

    Attributes:
        path, kind: of the module: its path, its class's name.
        nesting: how many calls around it have the same path, as a scan's body has its scan's.
        is_layer: whether it is a layer that multiplies.
        in_scan: whether a scan stands between it and the call around it, and any around it.
        in_loop: whether any scan stands around it.
        times: how often it was traced.
        rematerializes: whether layers are in a `jax.checkpoint` of the model's own, within it or around it.
    """

    path: str
    kind: str
    nesting: int = 0
    is_layer: bool = False
    in_scan: bool = False
    in_loop: bool = False
    times: int = 1
    rematerializes: bool = False
    below: list["Call"] = dataclasses.field(default_factory=list)

    @property
    def holds_layers(self) -> bool:
        """Whether there are layers within it."""
        return any(call.is_layer or call.holds_layers for call in self.below)

    def all_below(self) -> Iterator["Call"]:
        """Every call within it, the outer ones first."""
        for call in self.below:
            yield call
            yield from call.all_below()


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


def filled(leaves: list[Any], is_given: list[bool], given: Iterable[Any]) -> list[Any]:
    """The leaves, with those that are given in their places."""
    rest = iter(given)
    return [next(rest) if new else leaf for leaf, new in zip(leaves, is_given, strict=True)]
