"""Scaling methods for FP8 casts.

`delayed` computes a scale from the amaxes of previous steps, `current` from the tensor itself. `base.Scaling`
is their interface. `merge` combines the scaling states of several uses of a layer.
"""

from fp8jax.recipe import Recipe
from fp8jax.scaling import current, delayed
from fp8jax.scaling.base import Scaling as Scaling


def of_recipe(recipe: Recipe) -> Scaling:
    """The scaling of the recipe's GEMM column."""
    return {"delayed": delayed, "current": current}[recipe.scaling].build(recipe)
