"""Block scaling: scales are computed from the blocks of the tensor to cast.

    for_fprop, for_wgrad = quantized(recipe, LHS, lhs, state)

A GEMM contracts the last axis of both operands, and blocks run along it. Each operand takes part in two GEMMs
that contract different axes:

| operand | first GEMM | second GEMM |
|---|---|---|
| 0, lhs (m, k) | fprop, along k | wgrad, along m |
| 1, rhs (k, n) | fprop, along k | dgrad, along n |
| 2, grad (m, n) | dgrad, along n | wgrad, along m |

So an operand is quantized twice from high precision, as it is and transposed. Square blocks have the same
codes in both copies.

Only "nvfp4" has a state, for the random bits of output gradients:

    key    # shape=(2,), float32: a seed below 2**24, and the number of steps

A transformed model has a seed for each layer, from its path, and `fp8jax.value_and_grad` adds the number of
the device and of the microbatch, see `for_part`. The bits depend on the key, the entry's place and the
tensor's amax.

References:
    TransformerEngine 2.20 `Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`; see
    `fp8jax.quantization.blocks`.
"""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, PyTree, UInt32

from fp8jax import formats
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
    ScaledArray,
    leaf_seeds,
    quantize_twice,
    quantize_twice_fp4,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import State

LHS, RHS, GRAD = 0, 1, 2

_SPREAD = np.uint32(0x9E3779B1)  # odd: seeds of consecutive numbers are far apart


def init(recipe: Recipe) -> State:
    """The state of a dot."""
    if recipe.gemm == "FP4" and "stochastic" in recipe.fp4_options:
        return {"key": jnp.zeros(2, jnp.float32)}
    return {}


def with_seeds(state: State, path: str) -> State:
    """The state with seeds for the layer at `path`, other ones for each of its stacked layers."""
    if "key" not in state:
        return state
    stacked = state["key"].shape[:-1]
    seeds = np.arange(math.prod(stacked), dtype=np.uint32) * _SPREAD + zlib.crc32(path.encode())
    return {**state, "key": state["key"].at[..., 0].set((seeds % 2**24).astype(np.float32).reshape(stacked))}


def for_part(states: PyTree, number: Any) -> PyTree:
    """A tree of states for part `number` of a batch, a microbatch or a device's: with other random bits than
    part 0, whose bits are those of `states`."""

    def moved(path: Any, leaf: jax.Array) -> jax.Array:
        if not _is_key(path):
            return leaf
        seed = leaf[..., 0].astype(jnp.uint32) + jnp.asarray(number).astype(jnp.uint32) * _SPREAD
        return leaf.at[..., 0].set((seed % 2**24).astype(jnp.float32))

    return jax.tree.map_with_path(moved, states)


def of_whole(states: PyTree, old: PyTree) -> PyTree:
    """The states that a part of a batch leaves, with the seeds of the `old` ones."""
    return jax.tree.map_with_path(
        lambda path, new, old: new.at[..., 0].set(old[..., 0]) if _is_key(path) else new, states, old
    )


def _is_key(path: Any) -> bool:
    """Whether a leaf is a key: "key" in a dict of states, "kernel__fp8_key" in an NNX module."""
    names = [str(getattr(part, "key", getattr(part, "name", ""))) for part in path]
    return names[-1:] == ["key"] or any(name.endswith("__fp8_key") for name in names)


def update(state: State) -> State:
    """The arrays of the state that change, for the next step."""
    return {"key": state["key"].at[..., 1].add(1)} if "key" in state else {}


def quantized(
    recipe: Recipe,
    operand: int,
    x: Float[Array, "*batch rows columns"],
    state: State,
    gemms: tuple[int, ...] = (0, 1),
    whole_amax: Float32[Array, "..."] | None = None,
) -> tuple[ScaledArray, ...]:
    """Operand number `operand` of a dot, quantized for its GEMMs.

    Args:
        recipe: a recipe with block scaling.
        operand: `LHS`, `RHS` or `GRAD`.
        x: the operand as a matrix: lhs (m, k), rhs (k, n), grad (m, n).
        state: the dot's state.
        gemms: for which GEMMs of the operand: 0 for the first one, 1 for the second one.
        whole_amax: see `quantize_blocks`.

    Returns:
        For each GEMM a copy with the contracted axis last, padded to whole blocks.
    """
    method = method_of(recipe, operand)
    turns = tuple((gemm == 1) != (operand == RHS) for gemm in gemms)
    if recipe.gemm == "FP8":
        return quantize_twice(x, method, turns)
    return quantize_twice_fp4(
        x,
        state["key"] if operand == GRAD and "key" in state else None,
        method,
        turns,
        transform=operand != RHS and "hadamard" in recipe.fp4_options,
        seeds=_seeds,
        whole_amax=whole_amax,
    )


def _seeds(key: Float32[Array, "2"], amax: Float32[Array, ""]) -> UInt32[Array, "2"]:
    """The seeds of the random bits of a gradient as it is, and of its transpose."""
    of_tensor = lax.bitcast_convert_type(amax, jnp.uint32)
    return leaf_seeds(jnp.stack([key[0].astype(jnp.uint32), of_tensor]), key[1].astype(jnp.int32), 2)


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
