"""Scaling methods: how the operands of a dot are quantized.

`of_recipe` gives the `base.Scaling` of a recipe, from the table `SCALINGS`. `tensor` has one scale for a
tensor, from the amaxes of previous steps (`delayed`) or from the tensor itself (`current`); `block` has a
scale for each block of a tensor, and `nvfp4` also one for the tensor. `merge` combines the scaling states of
several uses of a layer.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from fp8jax.recipe import Recipe
from fp8jax.scaling import block, current, delayed, nvfp4
from fp8jax.scaling.base import CASTS as CASTS
from fp8jax.scaling.base import GRAD as GRAD
from fp8jax.scaling.base import KEY
from fp8jax.scaling.base import LHS as LHS
from fp8jax.scaling.base import OPERANDS as OPERANDS
from fp8jax.scaling.base import RHS as RHS
from fp8jax.scaling.base import Scaling as Scaling
from fp8jax.scaling.base import State as State
from fp8jax.scaling.block import BlockScaling as BlockScaling
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
