"""Scaling methods for FP8 casts.

`delayed` computes a scale from the amaxes of previous steps, `current` from the tensor itself; `base.Scaling`
is their interface. `block` computes scales from the blocks of a tensor. `merge` combines the scaling states
of several uses of a layer.
"""

from fp8jax.recipe import Recipe
from fp8jax.scaling import block, current, delayed
from fp8jax.scaling.base import Scaling as Scaling
from fp8jax.scaling.base import State


def init(recipe: Recipe, operands: int) -> State:
    """The initial state of a dot with this many operands, under the recipe's scaling."""
    return block.init(recipe) if recipe.has_blocks else of_recipe(recipe).init(operands)


def of_recipe(recipe: Recipe) -> Scaling:
    """The scaling of the recipe's GEMM column, which has a scale for each tensor."""
    return {"delayed": delayed, "current": current}[recipe.scaling].build(recipe)
