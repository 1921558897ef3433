"""The policies of remat, and the remat arguments of `fp8jax.transform` as one value."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from fp8jax.dot import OUTPUT, OUTPUT_CODES, save_fp8_operands
from fp8jax.recipe import Recipe
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
