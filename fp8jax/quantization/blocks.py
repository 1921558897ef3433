"""Block scaling: a scale for each block of a matrix, computed from the block.

    q = quantize_blocks(x, BLOCK_1X128)      # x.shape=(m, k): codes of shape (m, k), scales (m, k / 128)

Blocks run along the last axis, the contracted axis of a GEMM's operand. An operand of two GEMMs that contract
different axes is quantized twice: as it is, and transposed.

| method | codes | block | scale |
|---|---|---|---|
| `BLOCK_1X128`, `BLOCK_128X128` | E4M3 or E5M2 | 1x128, 128x128 | float32, a power of two |
| `MXFP8` | E4M3 | 1x32 | E8M0 |
| `NVFP4_1X16`, `NVFP4_16X16` | E2M1 | 1x16, 16x16 | E4M3, times a float32 scale of the tensor |

A block of zeros has codes 0 and scale 1 (MXFP8: 2**-127, NVFP4: 0). A block with an infinity or NaN has a NaN
scale, so all its values are NaN; in NVFP4 the whole tensor is. Blocks of numbers below 2**-117, in
E5M2 below 2**-110, may become 0.

References:
    TransformerEngine 2.20 `Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`.
    DeepSeek-V3, arXiv 2412.19437, section 3.3; MXFP8 recipes, arXiv 2506.08027 (scales are rounded up);
    Pretraining with NVFP4, arXiv 2509.25149, sections 3 and 4; see `fp8jax.quantization.fp4` for two others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from fp8jax.formats import E2M1, E4M3, E8M0, Format
from fp8jax.quantization.array import ScaledArray, expand, format_of, is_scaled, value
from fp8jax.quantization.fp4 import butterflies, eden, four_or_six, largest_of, of_blocks, of_tensor
from fp8jax.quantization.packed import PackedE2M1
from fp8jax.quantization.quantize import amax, quantize
from fp8jax.quantization.rounding import cast, cast_stochastically, select
from fp8jax.quantization.scales import MAX_SCALE, MIN_SCALE, factor_of, usable


@dataclasses.dataclass(frozen=True)
class BlockMethod:
    """One way to quantize a matrix in blocks.

    Attributes:
        format: of the codes.
        block: rows and columns of a block.
        scale: "power_of_two" or "float32" (both stored as float32), "E8M0", or "E4M3" (on a float32 scale of
            the tensor).
        rule: how an E4M3 scale is chosen: "six", "four_or_six" or "eden", see `fp8jax.quantization.fp4`.
    """

    format: Format
    block: tuple[int, ...]
    scale: str = "power_of_two"
    rule: str = "six"

    @property
    def scale_format(self) -> str:
        """The format of the stored scales."""
        return "FP32" if self.scale in ("power_of_two", "float32") else self.scale

    def with_rule(self, rule: str) -> "BlockMethod":
        """The method with another rule."""
        return dataclasses.replace(self, rule=rule)

    def padded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A matrix's shape with both dims rounded up to whole blocks."""
        *batch, rows, columns = shape
        return (
            *batch,
            *(-(-dim // size) * size for dim, size in zip((rows, columns), self.block, strict=True)),
        )


BLOCK_1X128 = BlockMethod(E4M3, (1, 128))
BLOCK_128X128 = BlockMethod(E4M3, (128, 128))
MXFP8 = BlockMethod(E4M3, (1, 32), "E8M0")
NVFP4_1X16 = BlockMethod(E2M1, (1, 16), "E4M3")
NVFP4_16X16 = BlockMethod(E2M1, (16, 16), "E4M3")


def quantize_blocks(
    x: Float[Array, "*batch rows columns"],
    method: BlockMethod,
    random: UInt32[Array, "..."] | None = None,
    whole_amax: Float32[Array, "..."] | None = None,
) -> ScaledArray:
    """`x` in codes with a scale for each block.

    Args:
        x: float array. Dims that are no multiples of the block are padded with zeros.
        method: the format, the block and the kind of scale.
        random: random bits of the padded shape, for stochastic rounding; for the rule "eden" of the scales'
            shape. None rounds to nearest even.
        whole_amax: for NVFP4 the amax that sets the scale of the tensor, shape=(*batch, 1, 1); None for the
            amax of each matrix of `x`.

    Returns:
        A `ScaledArray` of the padded shape; E2M1 codes are `PackedE2M1`. Its scale is float32, E8M0, or for
        NVFP4 a `ScaledArray` of E4M3 with one float32 scale for each matrix. Only the rounding of an E4M3
        scale makes a code saturate.
    """
    *batch, rows, columns = x.shape
    shape = method.padded(x.shape)
    if shape != x.shape:
        x = jnp.pad(x, [(0, padded - dim) for padded, dim in zip(shape, x.shape, strict=True)])
    blocks = (*batch, shape[-2] // method.block[0], shape[-1] // method.block[1])
    return quantize_in(x, blocks, method, random, whole_amax)


def quantize_in(
    x: Float[Array, "..."],
    blocks: tuple[int, ...],
    method: BlockMethod,
    random: UInt32[Array, "..."] | None = None,
    whole_amax: Float32[Array, "..."] | None = None,
) -> ScaledArray:
    """`x` in codes with as many scales along each axis as `blocks` says; see `quantize_blocks`."""
    x, largest = x.astype(jnp.float32), amax(x, blocks)
    if method.rule == "four_or_six":
        return four_or_six(x, largest, whole_amax)
    if method.rule == "eden":
        return eden(x, largest, random, whole_amax)
    factor, scale = factors(largest, method, whole_amax)
    if method.scale == "E8M0":
        scale = lax.bitcast_convert_type(scale, E8M0.dtype)
    codes = x * expand(factor, x.shape)
    if method.format == E2M1:
        return ScaledArray(PackedE2M1.cast(codes, random), scale)
    if random is not None:
        return ScaledArray(cast_stochastically(codes, method.format, random), scale)
    return ScaledArray(cast(codes, method.format), scale)


def quantize_like(x: Any, like: Any) -> Any:
    """`x` quantized to the format, blocks and model dtype of `like`, on new scales of the same kind.

    Returns:
        A `ScaledArray`, or the value of `x` if `like` is no `ScaledArray`. NVFP4's scales have the rule
        "six", since `like` does not tell its own.
    """
    if not is_scaled(like):
        return value(x)
    blocks, format, scale = like.bits.shape, format_of(like), like.scale
    if is_scaled(scale):
        x = jnp.asarray(value(x))
        q = quantize_in(x, blocks, BlockMethod(format, (), "E4M3"), whole_amax=amax(x, scale.scale.shape))
    elif scale.dtype == E8M0.dtype:
        q = quantize_in(jnp.asarray(value(x)), blocks, BlockMethod(format, (), "E8M0"))
    else:
        q = quantize(x, format, power_of_two=True, blocks=blocks)
    return q.with_own_dtype(like.own_dtype)


def factors(
    amax: Float32[Array, "..."],
    method: BlockMethod,
    whole_amax: Float32[Array, "..."] | None = None,
    divide: Callable[..., Any] = lax.div,
) -> tuple[Float32[Array, "..."], Any]:
    """The factor of each block before its cast, and the scale to store; an E8M0 scale as uint8.

    Args:
        amax: of each block; infinite for a block with an infinity or NaN.
        method: its kind of scale and format.
        whole_amax: see `quantize_blocks`.
        divide: division of float32 arrays, rounded to nearest.
    """
    if method.scale == "float32":
        return _float32(amax, method.format, divide)
    if method.scale == "E4M3":
        return _e4m3(amax, method.format, whole_amax)
    return _FACTORS[method.scale](amax, method.format)


def _power_of_two(amax: Float32[Array, "..."], format: Format) -> tuple[Any, Any]:
    factor = select(usable(amax), factor_of(amax, format.max, power_of_two=True), 1.0)
    # The exponent with the other sign: 1 / factor without a division.
    scale = lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(factor, jnp.int32), jnp.float32)
    return _nan_unless_finite(factor, amax), _nan_unless_finite(scale, amax)


def _float32(amax: Float32[Array, "..."], format: Format, divide: Callable[..., Any]) -> tuple[Any, Any]:
    factor = divide(jnp.full_like(amax, format.max), amax)
    factor = lax.clamp(np.float32(MIN_SCALE), factor, np.float32(MAX_SCALE))
    factor = _nan_unless_finite(select(usable(amax), factor, 1.0), amax)
    return factor, divide(jnp.ones_like(factor), factor)


def _e8m0(amax: Float32[Array, "..."], format: Format) -> tuple[Any, Any]:
    """The exponent of amax / format.max, rounded up."""
    limit = np.float32(format.max).view(np.uint32)
    mantissa, exponent = limit & np.uint32(0x7FFFFF), np.int32(limit >> np.uint32(23)) - 127
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    # Carries into the exponent if the mantissa is larger than the limit's.
    above = (bits + (np.uint32(0x7FFFFF) - mantissa)) >> np.uint32(23)
    code = lax.max(above.astype(jnp.int32) - exponent, jnp.zeros_like(above, jnp.int32))
    code = select(amax < jnp.inf, code, 255)
    # 2**(127 - code); a code of 254 would need a subnormal number.
    factor = lax.bitcast_convert_type((lax.max(254 - code, jnp.ones_like(code))) << 23, jnp.float32)
    return _nan_unless_finite(factor, amax), code.astype(jnp.uint8)


def _e4m3(amax: Float32[Array, "..."], format: Format, whole_amax: Any) -> tuple[Any, Any]:
    """E4M3 scales of blocks, on the float32 scale of each matrix."""
    encode, decode = of_tensor(largest_of(amax, whole_amax))
    factor, of_block = of_blocks(amax, encode, decode, format.max)
    return factor, ScaledArray(of_block, decode)


def _nan_unless_finite(x: Float32[Array, "..."], amax: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return select(amax < jnp.inf, x, float("nan"))


_FACTORS = {"power_of_two": _power_of_two, "E8M0": _e8m0}

# The signs of TransformerEngine's 16x16 random Hadamard transform.
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def hadamard(x: Float[Array, "... columns"]) -> Float[Array, "... columns"]:
    """Each 16 columns times an orthogonal 16x16 matrix, a Hadamard matrix with random signs; x's
    dtype, but float32 for float16, whose largest number the transform may exceed.

    It spreads outliers over a block, and leaves a GEMM of two operands that are transformed along the
    contracted axis as it is.

    Args:
        x: its last dim is a multiple of 16.

    References:
        Pretraining with NVFP4, arXiv 2509.25149, section 4.2; TransformerEngine `get_wgrad_sign_vector`.
    """
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    y = butterflies((y * jnp.broadcast_to(SIGNS, y.shape)).reshape(x.shape), 16)
    return (y * np.float32(0.25)).astype(dtype_of_hadamard(x.dtype))


def dtype_of_hadamard(dtype: Any) -> Any:
    """The dtype of `hadamard`'s output."""
    return jnp.float32 if dtype == jnp.float16 else dtype
