"""The table of scalings, and the scaling of a recipe."""

from fp8jax.recipe import Recipe
from fp8jax_torch.scaling.base import Scaling
from fp8jax_torch.scaling.block import BlockScaling
from fp8jax_torch.scaling.tensor import CurrentScaling, DelayedScaling

SCALINGS: dict[str, type[Scaling]] = {
    "delayed": DelayedScaling,
    "current": CurrentScaling,
    "block": BlockScaling,
    "block_float32": BlockScaling,
    "mxfp8": BlockScaling,
    "nvfp4": BlockScaling,
}


def of_recipe(recipe: Recipe) -> Scaling:
    """The scaling of the recipe's GEMM column."""
    return SCALINGS[recipe.scaling](recipe)
