"""NVFP4's E4M3 scales of blocks, and three rules to choose them.

| rule | a block's amax becomes | codes | scale |
|---|---|---|---|
| "six" | 6 | nearest, or stochastic | nearest |
| "four_or_six" | 4 or 6, with the smaller squared error | nearest | nearest |
| "eden" | 6.07 | nearest, of a rotated tensor | corrected, then stochastic |

All three store E2M1 codes, E4M3 scales and a float32 scale of the tensor, so the GEMMs are the same.

JAX and PyTorch agree on every bit. For that, sums over a block have a fixed order, and `SETTLED` stands
between each product and its sum: a compiler cannot make a fused multiply-add of them.

References:
    Four Over Six, arXiv 2512.02010, section 3: "four_or_six". Errors are measured in units of the scales.
    Quartet II, arXiv 2601.22813, section 3.3 and algorithm 1: "eden" (MS-EDEN). The rotation is float32 and
    not bfloat16.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from fp8jax.formats import E2M1, E4M3
from fp8jax.quantization.array import ScaledArray, expand
from fp8jax.quantization.packed import PackedE2M1
from fp8jax.quantization.rounding import cast, cast_by_bits, cast_stochastically, rounded_magnitude, select
from fp8jax.quantization.scales import factor_of, usable

# What a block's amax becomes, by rule; and the largest scale of a block before it is corrected. With 256, the
# scale that maps an amax to 4 is at most 384, and a corrected scale has room up to 448.
# 6.07 clips the largest code by 1%: the smallest mean squared error of normal numbers.
CODE_LIMITS = {"six": 6.0, "four_or_six": 6.0, "eden": 6 * 16 / 17 / 0.93}
SCALE_LIMITS = {"six": E4M3.max, "four_or_six": 256.0, "eden": 256.0}

# Larger than any square of a scaled number, unless the block's scale is 0.
SETTLED = 1024.0
# Added to a sum of squares, so that it does not matter whether a compiler takes subnormal squares for 0.
NOTHING = 2.0**-60

# Of errors, so that rounding does not decide between equal ones.
EQUAL = 1 - 2.0**-14

ROTATION = 128  # entries


def largest_of(amax: Float32[Array, "..."], whole_amax: Float32[Array, "..."] | None) -> Any:
    """The amax of each matrix, from the amaxes of its blocks, unless it is given."""
    return jnp.max(amax, axis=(-2, -1), keepdims=True, initial=0) if whole_amax is None else whole_amax


def of_tensor(amax: Float32[Array, "..."], rule: str = "six") -> tuple[Any, Any]:
    """NVFP4's factor of a tensor before the scales of its blocks, and the scale to store."""
    encode = select(usable(amax), factor_of(amax, CODE_LIMITS[rule] * SCALE_LIMITS[rule]), 1.0)
    encode = select(amax < jnp.inf, encode, float("nan"))
    return encode, 1 / encode


def of_blocks(
    amax: Float32[Array, "..."],
    encode: Float32[Array, "..."],
    decode: Float32[Array, "..."],
    limit: float,
    divide: Callable[..., Any] = lax.div,
) -> tuple[Float32[Array, "..."], Float[Array, "..."]]:
    """NVFP4's factor of each block before its cast, and its E4M3 scale, from the results of `of_tensor`.

    The amax becomes `limit`, but for the rounding of the scale.
    """
    of_block = cast_by_bits(amax * (encode * np.float32(1 / np.float32(limit))), E4M3)
    whole = of_block.astype(jnp.float32) * decode
    inverse = divide(jnp.ones_like(whole), whole)
    return lax.min(inverse, jnp.full_like(whole, np.finfo(np.float32).max)), of_block


def four_or_six(
    x: Float32[Array, "..."], amax: Float32[Array, "..."], whole_amax: Float32[Array, "..."] | None = None
) -> ScaledArray:
    """`x` rounded to nearest, each block's amax to 4 or to 6, with the smaller sum of squared errors.

    E2M1 has no number between 4 and 6. A block with several numbers in the upper third of its range loses
    less if they are between 3 and 4. Of equal errors 6 is taken: a scale may be exactly 1.5 times the other
    one, so that both give the same numbers. Errors count as equal within 2**-14.

    Args:
        x: any shape.
        amax: of the blocks, with as many dims.
        whole_amax: see `quantize_blocks`.
    """
    encode, decode = of_tensor(largest_of(amax, whole_amax), "four_or_six")
    (six, of_six), (four, of_four) = (of_blocks(amax, encode, decode, limit) for limit in (6.0, 4.0))
    errors = [_error(x, *each) for each in ((six, of_six), (four, of_four))]
    # A scale of 0 has no error in its own units.
    is_four = (errors[1] < errors[0] * np.float32(EQUAL)) | (of_six == 0)
    factor = select(is_four, four, six)
    scale = select(is_four, of_four, of_six)
    return ScaledArray(PackedE2M1.cast(x * expand(factor, x.shape)), ScaledArray(scale, decode))


def _error(x: Any, factor: Any, scale: Any) -> Any:
    """The sum of squared errors of each block, in units of the scale of the tensor."""
    magnitude = lax.abs(x * expand(factor, x.shape))
    off = magnitude - rounded_magnitude(magnitude, E2M1)
    scale = scale.astype(jnp.float32)
    return (block_sums(lax.min(off * off, SETTLED), scale.shape) + np.float32(NOTHING)) * scale * scale


def eden(
    x: Float32[Array, "..."],
    amax: Float32[Array, "..."],
    random: UInt32[Array, "..."] | None = None,
    whole_amax: Float32[Array, "..."] | None = None,
) -> ScaledArray:
    """`x`, which went through `rotated`, rounded to nearest, with scales that make a GEMM unbiased.

    A block's scale is multiplied by <x, x> / <x, q>, of the block x and its codes q in float32. So the codes
    times the scale have the length of x in the direction of x, and random rotations average the other
    directions. The product is rounded stochastically, since a step of E4M3 is larger than most corrections.

    Args:
        x: any shape.
        amax: of the blocks, with as many dims.
        random: random bits, one number for each block; None rounds the corrected scale to nearest.
        whole_amax: see `quantize_blocks`.
    """
    encode, decode = of_tensor(largest_of(amax, whole_amax), "eden")
    factor, scale = of_blocks(amax, encode, decode, CODE_LIMITS["eden"])
    scaled = x * expand(factor, x.shape)
    magnitude = lax.abs(scaled)
    parts = (magnitude, rounded_magnitude(magnitude, E2M1))
    length, along = (block_sums(lax.min(magnitude * part, SETTLED), scale.shape) for part in parts)
    is_usable = along > 0
    corrected = scale.astype(jnp.float32) * (select(is_usable, length, 1.0) / select(is_usable, along, 1.0))
    scale = cast(corrected, E4M3) if random is None else cast_stochastically(corrected, E4M3, random)
    return ScaledArray(PackedE2M1.cast(scaled), ScaledArray(scale, decode))


def block_sums(x: Float32[Array, "..."], blocks: tuple[int, ...]) -> Float32[Array, "..."]:
    """The sum of each block, whose dims are powers of two, by sums of halves: always in the same order."""
    x = x.reshape(
        [n for dim, count in zip(x.shape, blocks, strict=True) for n in (count, dim // max(count, 1))]
    )
    for axis in range(x.ndim - 1, 0, -2):
        while x.shape[axis] > 1:
            half = x.shape[axis] // 2
            x = lax.slice_in_dim(x, 0, half, axis=axis) + lax.slice_in_dim(x, half, 2 * half, axis=axis)
    return x.reshape(blocks)


def rotated(x: Float[Array, "... columns"], signs: Float32[Array, "128"]) -> Float32[Array, "... columns"]:
    """Each 128 columns times an orthogonal matrix, a Hadamard matrix with random signs; float32.

    A GEMM of two operands that are rotated along the contracted axis by the same signs is unchanged.
    """
    return _hadamard(x.astype(jnp.float32) * _repeated(signs, x))


def rotated_back(x: Float32[Array, "... columns"], signs: Float32[Array, "128"]) -> Float32[Array, "..."]:
    """The inverse of `rotated`."""
    return _hadamard(x) * _repeated(signs, x)


def _hadamard(x: Any) -> Any:
    return butterflies(x, ROTATION) * np.float32(ROTATION**-0.5)


def _repeated(signs: Any, x: Any) -> Any:
    return jnp.broadcast_to(jnp.tile(signs, x.shape[-1] // ROTATION), x.shape)


def butterflies(x: Float32[Array, "... columns"], size: int) -> Float32[Array, "... columns"]:
    """Each `size` columns times the Hadamard matrix of Sylvester, whose entries are 1 and -1."""
    # By sums and differences of halves, which XLA fuses into the cast; a matmul would be a GEMM of its own.
    shape, width = x.shape, size // 2
    while width:
        halves = x.reshape(*shape[:-1], shape[-1] // (2 * width), 2, width)
        low, high = halves[..., 0, :], halves[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2)
        width //= 2
    return x.reshape(shape)
