"""Dimensions that cost more than they give: which ones, what they cost, and what to take instead.

    print("\n".join(advise(model.report(*inputs))))
    up: 1000 outputs: no multiple of 16, so XLA multiplies copies padded to 1008, 2% of the work ...; take ...

A GPU computes a matrix product in tiles. What of the last tile lies outside of the matrix is computed for
nothing, and takes the time of the rest. cuBLASLt's FP8 products want dimensions that are multiples of 16.
A dimension is a side of the result in two of a layer's three GEMMs, and is summed over in the third.

References:
    NVIDIA, Matrix Multiplication Background User's Guide, sections on tensor core requirements and tile
    quantization; cuBLAS documentation, `cublasLtMatmul` (FP8: dimensions are multiples of 16).
"""

from typing import Any

import jax

from fp8jax import adapters
from fp8jax.adapters import linen, nnx
from fp8jax.inspect import models
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import Report

ALIGNED = 16  # numbers, of an FP8 operand's dimensions

# Sides of cuBLAS's tiles: 128 where there is as much, also 64.
TILE, SMALL_TILE = 128, 64

WORTH_TELLING = 0.01  # of the work


def of_model(model: Any, recipe: Recipe | str, inputs: tuple[Any, ...]) -> list[str]:
    """`advise` of a model, Linen or NNX, plain or transformed; nothing is computed."""
    if linen.is_module(model):
        model = adapters.transform(model, recipe)
    elif nnx.is_module(model) and not nnx.recipes(model):
        model = models.under(model, Recipe.parse(recipe))
    found: list[Report] = []
    # Traced, or the random key that a report starts from would be made on a device.
    jax.eval_shape(lambda: found.append(adapters.report(model, *inputs)))
    return advise(found[0])


def advise(report: Report) -> list[str]:
    """A line for each dimension of layers in FP8 that is worth changing; none if all are well."""
    layers: dict[tuple[str, int], list[str]] = {}
    for row in report.rows:
        if row.fp8 and row.gemm is not None:
            rows = "rows of a block" if row.kind == "ExpertDense" else "rows"
            for name, size in zip((rows, "inputs", "outputs"), row.gemm, strict=True):
                layers.setdefault((name, size), []).append(row.path or "(root)")
    lines = []
    for (name, size), paths in layers.items():
        if cost := costs(size):
            instead = "more tokens for each expert" if name == "rows of a block" else better(size)
            lines.append(f"{', '.join(paths)}: {size} {name}: {cost}; take {instead}")
    return lines


def costs(size: int) -> str:
    """What a dimension of this size costs; "" if that is nothing worth telling."""
    said = []
    if size % ALIGNED:
        said.append(f"no multiple of {ALIGNED}, so XLA multiplies copies padded to {_up(size, ALIGNED)}")
    if (lost := wasted(size)) >= WORTH_TELLING:
        said.append(f"{lost:.0%} of the work on tiles of {_tile(size)} is for nothing")
    return ", ".join(said)


def better(size: int) -> str:
    """The nearest sizes that fill their tiles."""
    above = _up(size, _tile(size))
    below = above - _tile(size)
    return f"{below} or {above}" if below and above != size else str(above)


def wasted(size: int) -> float:
    """The share of the work on tiles that lies outside of a dimension of this size."""
    return 1 - size / _up(size, _tile(size))


def _tile(size: int) -> int:
    return TILE if size > SMALL_TILE else SMALL_TILE


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
