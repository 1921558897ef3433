"""What an optimizer is told, and what the weights tell it.

The formats of the weights are in their dtypes, so a recipe need not say them again; a recipe that says
something else is one of another model.
"""

from typing import Any

import jax

from fp8jax import recipe as recipes
from fp8jax.recipe import Recipe
from fp8jax.scaled import format_of, is_scaled


def recipe_of(recipe: Recipe | str | None) -> Recipe | None:
    """The recipe that was told, if any."""
    return None if recipe is None else Recipe.parse(recipe)


def check_rate(learning_rate: Any) -> None:
    """Raises TypeError for a recipe in the place of a learning rate."""
    if isinstance(learning_rate, str | Recipe):
        raise TypeError(
            f"`learning_rate`: expected a number or a schedule; got {str(learning_rate)!r}. The rate comes "
            "first, then the recipe: adamw(3e-4, 'O2')."
        )


def check_weights(recipe: Recipe | None, params: Any) -> None:
    """Raises ValueError if a recipe's weights are not those of the parameters, see `recipe.check_weights`."""
    leaves = jax.tree.leaves(params, is_leaf=is_scaled)
    if recipe is not None:
        recipes.check_weights(recipe, {format_of(leaf).name for leaf in leaves if is_scaled(leaf)})


def refuse_8_bits(params: Any) -> None:
    """Raises ValueError for weights in 8 bits, by an optimizer that keeps no masters."""
    for leaf in jax.tree.leaves(params, is_leaf=is_scaled):
        if is_scaled(leaf) and format_of(leaf).bits == 8:
            raise ValueError(
                f"`params`: expected weights of 16 bits or more; got {format_of(leaf).name}"
                f"{list(leaf.shape)}, in which small steps are lost. adam, adamw and adamw_8bit keep masters."
            )
