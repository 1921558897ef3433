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
from fp8jax.scaling.eden import EDEN

_BLOCK = BLOCK_128X128, BLOCK_1X128
# The methods of rhs and of other operands in FP8.
_METHODS = {
    "block": _BLOCK,
    "block_float32": tuple(dataclasses.replace(method, scale="float32") for method in _BLOCK),
    "mxfp8": (MXFP8, MXFP8),
}


def method_of(recipe: Recipe, operand: int, use: int = 0) -> BlockMethod:
    """How an operand is quantized for its first GEMM (0) or its second one (1)."""
    if recipe.gemm == "FP4":
        return _nvfp4(recipe.fp4_options, operand, use)
    format = formats.get(recipe.gemm_formats[operand == GRAD])
    of_rhs, of_others = _METHODS[recipe.scaling]
    return dataclasses.replace(of_rhs if operand == RHS else of_others, format=format)


def _nvfp4(options: tuple[str, ...], operand: int, use: int) -> BlockMethod:
    """The method of NVFP4.

    "46" is for codes that are rounded to nearest: to choose the scale with the smaller error would give
    stochastic rounding a bias (arXiv 2601.22813, section 4.2).
    """
    if "eden" in options and (use == 1 or operand == GRAD):
        return EDEN
    method = NVFP4_16X16 if operand == RHS and "2d" in options else NVFP4_1X16
    is_nearest = operand != GRAD or "stochastic" not in options
    return method.with_rule("four_or_six") if "46" in options and is_nearest else method
