"""NVFP4's "eden": the operands of dgrad and wgrad rounded to nearest in a random rotation.

    copy = quantize_operand(GRAD, grad, 1, state)      # for wgrad: transposed, padded, rotated, quantized

Both operands of a GEMM are rotated along the contracted axis, by the same signs, so the GEMM of their codes
is an estimate of the GEMM of the operands and nothing is rotated back. The signs depend on the key and on the
GEMM. The random bits of the scales depend on the operand and its amax, too.

A matrix has the same signs in each 128 contracted entries. Stacked matrices, and groups of rows, have those
of the first one's key.

References:
    Quartet II, arXiv 2601.22813, sections 3.3 and 5. There the weight and the input of the backward are the
    codes of the forward, dequantized; here they are quantized from high precision, as in NVIDIA's recipe.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from fp8jax.quantization import NVFP4_1X16, ScaledArray, amax, leaf_seeds, quantize_blocks, random_bits
from fp8jax.quantization.fp4 import ROTATION, rotated, rotated_back
from fp8jax.scaling.base import GRAD, RHS, State

EDEN = NVFP4_1X16.with_rule("eden")


def quantize_operand(
    operand: int, x: Float[Array, "*batch rows columns"], use: int, state: State
) -> ScaledArray:
    """Operand number `operand` for its GEMM number `use`, with the contracted axis last.

    Args:
        operand: `LHS`, `RHS` or `GRAD`.
        x: the operand as a matrix: lhs (m, k), rhs (k, n), grad (m, n).
        use: 0 or 1; of lhs and rhs 1.
        state: the dot's. Without a key the signs are those of the key 0.
    """
    key = _key(state)
    copy = jnp.swapaxes(x, -1, -2) if (use == 1) != (operand == RHS) else x
    copy = jnp.pad(copy, [(0, 0)] * (x.ndim - 1) + [(0, -copy.shape[-1] % ROTATION)])
    copy = rotated(copy, signs(state, operand, use))
    seed = _seed(key, lax.bitcast_convert_type(amax(x), jnp.uint32), of_scales(operand, use))
    random = random_bits(seed, (*copy.shape[:-1], copy.shape[-1] // EDEN.block[1]))
    return quantize_blocks(copy, EDEN, random)


def signs(state: State, operand: int, use: int) -> Float32[Array, "128"]:
    """The signs of an operand's rotation, those of the other operand of its GEMM."""
    bits = random_bits(_seed(_key(state), jnp.uint32(0), of_signs(operand, use)), (ROTATION,))
    return 1 - 2 * (bits >> np.uint32(31)).astype(jnp.float32)


def of_signs(operand: int, use: int) -> int:
    """The number of the seed of the signs: 6 for dgrad, 7 for wgrad."""
    is_dgrad = operand == RHS or (operand == GRAD and use == 0)
    return 6 if is_dgrad else 7


def of_scales(operand: int, use: int) -> int:
    """The number of the seed of the scales' random bits, 0 to 5."""
    return 2 * operand + use


def values(q: ScaledArray, state: State, operand: int, use: int) -> Float32[Array, "..."]:
    """The operand's values, rotated back."""
    return rotated_back(q.dequantize(), signs(state, operand, use))


def _key(state: State) -> Float32[Array, "2"]:
    return state["key"].reshape(-1, 2)[0] if "key" in state else jnp.zeros(2, jnp.float32)


def _seed(key: Float32[Array, "2"], of_tensor: UInt32[Array, ""], leaf: int) -> jax.Array:
    first = jnp.stack([key[0].astype(jnp.uint32), of_tensor])
    return leaf_seeds(first, key[1].astype(jnp.int32), leaf + 1)[leaf]
