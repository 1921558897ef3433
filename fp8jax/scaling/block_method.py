"""How the operands of a block-scaled dot are quantized."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from fp8jax import formats
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import GRAD, RHS
from fp8jax.scaling.eden import EDEN

# (recipe, operand, use) -> how an operand is quantized for its first GEMM (use 0) or its second one (1).
MethodOf = Callable[[Recipe, int, int], BlockMethod]


class InFP8(NamedTuple):
    """The methods of rhs and of other operands, whose formats are the recipe's; a `MethodOf`."""

    rhs: BlockMethod
    others: BlockMethod

    def __call__(self, recipe: Recipe, operand: int, use: int) -> BlockMethod:
        """See `MethodOf`."""
        del use
        format = formats.get(recipe.gemm_formats[operand == GRAD])
        return dataclasses.replace(self.rhs if operand == RHS else self.others, format=format)


BLOCK = InFP8(BLOCK_128X128, BLOCK_1X128)
BLOCK_FLOAT32 = InFP8(*(dataclasses.replace(method, scale="float32") for method in BLOCK))
BLOCK_OF_32 = InFP8(MXFP8, MXFP8)


def nvfp4(recipe: Recipe, operand: int, use: int) -> BlockMethod:
    """The method of NVFP4, a `MethodOf`.

    "46" is for codes that are rounded to nearest: to choose the scale with the smaller error would give
    stochastic rounding a bias (arXiv 2601.22813, section 4.2).
    """
    options = recipe.fp4_options
    if "eden" in options and (use == 1 or operand == GRAD):
        return EDEN
    method = NVFP4_16X16 if operand == RHS and "2d" in options else NVFP4_1X16
    is_nearest = operand != GRAD or "stochastic" not in options
    return method.with_rule("four_or_six") if "46" in options and is_nearest else method
