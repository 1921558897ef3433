"""Block scaling: scales are computed from the blocks of the tensor to cast.

    copies = quantized(recipe, 0, lhs, state)     # lhs for fprop, and for wgrad

A GEMM contracts the last axis of both operands, and blocks run along it. Each operand takes part in two GEMMs
that contract different axes:

| operand | first GEMM | second GEMM |
|---|---|---|
| 0, lhs (m, k) | fprop, along k | wgrad, along m |
| 1, rhs (n, k) | fprop, along k | dgrad, along n |
| 2, grad (m, n) | dgrad, along n | wgrad, along m |

So an operand is quantized twice from high precision, as it is and transposed. Square blocks of a kernel serve
both GEMMs with the same codes.

Only "nvfp4" has a state, for the random bits of output gradients:

    key    # shape=(2,), float32: a seed, and the number of steps

The bits depend on the key and on the tensor's amax, so they differ between steps, layers and devices, and are
equal on devices that hold copies of one tensor.

References:
    TransformerEngine 2.20 `Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`; see
    `fp8jax.quantization.blocks`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8jax import formats
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
    PackedE2M1,
    ScaledArray,
    amax,
    hadamard,
    leaf_seeds,
    quantize_blocks,
    quantize_twice,
    random_bits,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import State

LHS, RHS, GRAD = 0, 1, 2


class Copies(NamedTuple):
    """An operand quantized for its two GEMMs, with the contracted axis last."""

    first: ScaledArray
    second: ScaledArray


def init(recipe: Recipe) -> State:
    """The state of a dot."""
    if recipe.gemm == "FP4" and "stochastic" in recipe.fp4_options:
        return {"key": jnp.zeros(2, jnp.float32)}
    return {}


def update(state: State) -> State:
    """The arrays of the state that change, for the next step."""
    return {"key": state["key"].at[..., 1].add(1)} if "key" in state else {}


def quantized(recipe: Recipe, operand: int, x: Float[Array, "*batch rows columns"], state: State) -> Copies:
    """Operand number `operand` of a dot for both of its GEMMs.

    Args:
        recipe: a recipe with block scaling.
        operand: `LHS`, `RHS` or `GRAD`.
        x: the operand as a matrix, its first GEMM's contracted axis last.
        state: the dot's state.

    Returns:
        `first` of the shape of `x`, `second` of its transpose, both padded to whole blocks.
    """
    method = method_of(recipe, operand)
    if recipe.gemm == "FP8":
        return Copies(*quantize_twice(x, method))
    if method.block[0] > 1:
        first = quantize_blocks(x, method)
        return Copies(first, transposed(first))
    turned = jnp.swapaxes(x, -1, -2)
    if "hadamard" in recipe.fp4_options and operand != RHS:
        turned = hadamard(_padded(turned, method))
    first, second = _random(recipe, operand, x, turned, method, state)
    return Copies(quantize_blocks(x, method, first), quantize_blocks(turned, method, second))


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


def transposed(q: ScaledArray) -> ScaledArray:
    """The transpose of matrices with square blocks."""
    is_packed = isinstance(q.data, PackedE2M1)
    data = q.data.transposed if is_packed else jnp.swapaxes(q.data, -1, -2)
    scale = transposed(q.scale) if isinstance(q.scale, ScaledArray) else jnp.swapaxes(q.scale, -1, -2)
    return ScaledArray(data, scale)


def _padded(x: jax.Array, method: BlockMethod) -> jax.Array:
    pairs = zip(method.padded(x.shape), x.shape, strict=True)
    return jnp.pad(x, [(0, padded - dim) for padded, dim in pairs])


def _random(
    recipe: Recipe, operand: int, x: jax.Array, turned: jax.Array, method: BlockMethod, state: State
) -> tuple[Any, Any]:
    """Random bits for both copies of a gradient; Nones where rounding is to nearest."""
    if operand != GRAD or "key" not in state:
        return None, None
    seed, step = state["key"]
    of_tensor = lax.bitcast_convert_type(amax(x), jnp.uint32)
    seeds = leaf_seeds(jnp.stack([seed.astype(jnp.uint32), of_tensor]), step.astype(jnp.int32), 2)
    shapes = map(method.padded, (x.shape, turned.shape))
    first, second = (random_bits(seed, shape) for seed, shape in zip(seeds, shapes, strict=True))
    return first, second
