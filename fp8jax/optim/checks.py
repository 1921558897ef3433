"""Checks of an optimizer's arguments.

The parameters' dtypes show the weight format. A recipe with another weight format belongs to another model,
and raises.
"""

from typing import Any

import jax

from fp8jax import recipe as recipes
from fp8jax.comm import Zero
from fp8jax.quantization import format_of, is_scaled
from fp8jax.recipe import Recipe


def recipe_of(recipe: Recipe | str | None) -> Recipe | None:
    """The parsed `recipe`, or None."""
    return None if recipe is None else Recipe.parse(recipe)


def check_rate(learning_rate: Any) -> None:
    """Raises TypeError if `learning_rate` is a recipe."""
    if isinstance(learning_rate, str | Recipe):
        raise TypeError(
            f"`learning_rate`: expected a number or a schedule; got {str(learning_rate)!r}. The rate comes "
            "first, then the recipe: adamw(3e-4, 'O2')."
        )


def check_weights(recipe: Recipe | None, params: Any) -> None:
    """Raises ValueError if the parameters' format is not the recipe's, see `recipe.check_weights`."""
    leaves = jax.tree.leaves(params, is_leaf=is_scaled)
    if recipe is not None:
        recipes.check_weights(recipe, {format_of(leaf).name for leaf in leaves if is_scaled(leaf)})


def refuse_8_bits(params: Any) -> None:
    """Raises ValueError for 8-bit weights. For optimizers without master weights."""
    for leaf in jax.tree.leaves(params, is_leaf=is_scaled):
        if is_scaled(leaf) and format_of(leaf).bits == 8:
            raise ValueError(
                f"`params`: expected weights of 16 bits or more; got {format_of(leaf).name}"
                f"{list(leaf.shape)}, in which small steps are lost. adam, adamw and adamw_8bit keep masters."
            )


def refuse_zero(zero: Zero | None, name: str, reason: str) -> None:
    """Raises ValueError if `zero` is given to the optimizer `name`."""
    if zero is not None:
        raise ValueError(
            f"`zero`: expected None, for {name} spreads no state over devices: {reason}; got a Zero. Use "
            "adamw, or leave `zero` to `value_and_grad` with stage 0."
        )


def refuse_masters(recipe: Recipe | str) -> None:
    """Raises ValueError for a recipe with master weights or with weights that are not rounded to nearest,
    which adafactor does not support."""
    row = Recipe.parse(recipe)
    if row.rounding[1] != "nearest":
        raise ValueError(
            f"`recipe`: expected one that rounds weights to nearest; got {row} with rounding="
            f"{'+'.join(row.rounding)}, which adam, adamw and adamw_8bit do. Use one of them, or O2."
        )
    if row.master_weight != "-":
        raise ValueError(
            f"`recipe`: expected one without master weights; got {row}, whose weights are too coarse for "
            "adafactor's steps. Use adamw or adamw_8bit, which keep masters, or a level like O2."
        )
