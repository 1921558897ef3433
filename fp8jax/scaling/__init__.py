"""How is a scale chosen? Each file is one answer; a recipe picks one.

The answers: `delayed` (from the amaxes of the steps before) and `current` (from the tensor
itself). What an answer is: `base.Scaling`. How states that meet are merged: `merge`.
"""

from fp8jax.recipe import Recipe
from fp8jax.scaling import current, delayed
from fp8jax.scaling.base import Scaling as Scaling
from fp8jax.scaling.base import State as State


def of_recipe(recipe: Recipe) -> Scaling:
    """The scaling that the recipe's GEMM column asks for."""
    return {"delayed": delayed, "current": current}[recipe.scaling].build(recipe)
