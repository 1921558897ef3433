"""How the operands of a block-scaled dot are quantized."""

import dataclasses

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


def method_of(recipe: Recipe, operand: int) -> BlockMethod:
    """How an operand is quantized."""
    if recipe.scaling == "nvfp4":
        return NVFP4_16X16 if operand == RHS and "2d" in recipe.fp4_options else NVFP4_1X16
    format = formats.get(recipe.gemm_formats[operand == GRAD])
    if recipe.scaling == "mxfp8":
        return dataclasses.replace(MXFP8, format=format)
    method = BLOCK_128X128 if operand == RHS else BLOCK_1X128
    scale = "float32" if recipe.scaling == "block_float32" else "power_of_two"
    return dataclasses.replace(method, format=format, scale=scale)
