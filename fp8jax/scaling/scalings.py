"""The table of scalings, and the scaling of a recipe.

A new scaling has an entry here, and a row in `fp8jax.recipe.legal_values.FIELDS_OF_SCALING`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from fp8jax.recipe import Recipe
from fp8jax.scaling import block, current, delayed, nvfp4
from fp8jax.scaling.base import KEY, Scaling
from fp8jax.scaling.block import BlockScaling
from fp8jax.scaling.tensor import TensorScaling

SCALINGS: dict[str, Callable[[Recipe], Scaling]] = {
    "delayed": functools.partial(TensorScaling, delayed.build),
    "current": functools.partial(TensorScaling, current.build),
    "block": functools.partial(BlockScaling, block.BLOCK),
    "block_float32": functools.partial(BlockScaling, block.BLOCK_FLOAT32),
    "mxfp8": functools.partial(BlockScaling, block.BLOCK_OF_32),
    "nvfp4": functools.partial(nvfp4.NVFP4Scaling, nvfp4.method_of),
}


def of_recipe(recipe: Recipe) -> Scaling:
    """The scaling of the recipe's GEMM column.

    Raises:
        NotImplementedError: `SCALINGS` has no entry for a legal value of `Recipe.scaling`.
    """
    if recipe.scaling not in SCALINGS:
        raise NotImplementedError(
            f"scaling={recipe.scaling}: expected an entry in `fp8jax.scaling.SCALINGS`; got entries for "
            f"{', '.join(SCALINGS)}."
        )
    return SCALINGS[recipe.scaling](recipe)


@functools.cache
def with_fresh_scales(recipe: Recipe) -> Recipe:
    """The recipe with scales of the tensor itself, in the place of scales from a state as delayed ones."""
    chosen = of_recipe(recipe)
    has_scales = chosen.granularity == "tensor" and {*jax.eval_shape(chosen.init)} - {KEY}
    return dataclasses.replace(recipe, scaling="current") if has_scales else recipe
