"""Blocks of a matrix: the codes and scales of `fp8jax.quantization.quantize_blocks`, bit for bit.

`fp8jax.quantization.blocks` says what blocks of zeros, and blocks with an infinity or NaN, become.
"""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32

from fp8jax import formats
from fp8jax.quantization import BlockMethod, fp4
from fp8jax.quantization.blocks import SIGNS
from fp8jax_torch import casts
from fp8jax_torch.gemm import Operand

# A midpoint of two magnitudes of E2M1 goes to the even code.
_MAGNITUDES = casts.E2M1_VALUES[:8].numpy()
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_MIDPOINTS[1::2] = np.nextafter(_MIDPOINTS[1::2], np.float32(0))
_TIES = torch.from_numpy(_MIDPOINTS)


def quantize_blocks(
    x: Float[torch.Tensor, "rows columns"],
    method: BlockMethod,
    random: Int32[torch.Tensor, "rows columns"] | None = None,
) -> Operand:
    """`fp8jax.quantization.quantize_blocks`; random bits are for E2M1 codes, or for the scales of "eden"."""
    x = padded(x, method).float()
    (rows, columns), (height, width) = x.shape, method.block
    tiles = x.view(rows // height, height, columns // width, width)
    amax = tiles.abs().amax((1, 3)).nan_to_num(nan=math.inf, posinf=math.inf)
    factor, scale, matrix_scale = _factors(tiles, amax, method)
    if method.rule == "eden":
        scale, random = _corrected(tiles, factor, scale, random), None
    scaled = (tiles * factor[:, None, :, None]).view(rows, columns)
    if method.format != formats.E2M1:
        return Operand(casts.cast(scaled, method.format), scale, matrix_scale)
    if random is None:
        codes = _nearest(scaled)
        codes.bitwise_or_((scaled.view(torch.int32) >> 31) << 3)
    else:
        codes = casts.stochastic_codes(scaled, method.format, random)
    codes = codes.masked_fill_(scaled == 0, 0).bitwise_and_(15).to(torch.uint8)  # zeros have no sign
    return Operand(codes[:, ::2] | codes[:, 1::2] << 4, scale, matrix_scale)


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest magnitudes of E2M1, int32."""
    return torch.bucketize(x.abs(), _TIES.to(x.device), out_int32=True)


def _factors(
    tiles: Float32[torch.Tensor, "down rows across columns"],
    amax: Float32[torch.Tensor, "down across"],
    method: BlockMethod,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The factor of each block before its cast, and the scales to store; see `fp8jax.quantization.blocks`."""
    limit, is_bad = method.format.max, amax == math.inf
    if method.scale == "E8M0":
        bits = int(np.float32(limit).view(np.int32))
        # Carries into the exponent if the mantissa is larger than the limit's.
        above = (amax.view(torch.int32) + (0x7FFFFF - (bits & 0x7FFFFF))) >> 23
        code = (above - ((bits >> 23) - 127)).clamp_(min=0).masked_fill_(is_bad, 255)
        factor = ((254 - code) << 23).view(torch.float32)
        return factor.masked_fill(is_bad, math.nan), code.to(torch.uint8).view(torch.float8_e8m0fnu), None
    if method.scale == "E4M3":
        largest, limit = casts.amax(amax), fp4.CODE_LIMITS[method.rule]
        encode = casts.factor_of(largest, limit * fp4.SCALE_LIMITS[method.rule])
        encode = encode.masked_fill(largest == math.inf, math.nan)
        decode = 1 / encode
        factor, scale = _of_blocks(amax, encode, decode, limit)
        if method.rule == "four_or_six":
            other_factor, other = _of_blocks(amax, encode, decode, 4.0)
            of_six = _error(tiles, factor, scale)
            is_four = _error(tiles, other_factor, other) < of_six * fp4.EQUAL
            is_four |= scale.float() == 0
            factor, scale = torch.where(is_four, other_factor, factor), torch.where(is_four, other, scale)
        return factor, scale, decode
    factor = casts.factor_of(amax, limit, power_of_two=method.scale == "power_of_two")
    factor = factor.masked_fill(is_bad, math.nan)
    return factor, 1 / factor, None


def _of_blocks(
    amax: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = casts.cast(amax * (encode * float(1 / np.float32(limit))), formats.E4M3)
    return (1 / (scale.float() * decode)).clamp(max=torch.finfo(torch.float32).max), scale


def _error(tiles: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    magnitude, rounded = _magnitudes(tiles, factor)
    scale = scale.float()
    return (_block_sums((magnitude - rounded).square()) + fp4.NOTHING) * scale * scale


def _corrected(tiles: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor, random: Any) -> torch.Tensor:
    """The scales of "eden"; see `fp8jax.quantization.fp4.eden`."""
    magnitude, rounded = _magnitudes(tiles, factor)
    length, along = (_block_sums(magnitude * part) for part in (magnitude, rounded))
    is_usable = along > 0
    corrected = scale.float() * (torch.where(is_usable, length, 1.0) / torch.where(is_usable, along, 1.0))
    if random is None:
        return casts.cast(corrected, formats.E4M3)
    return casts.cast_stochastically(corrected, formats.E4M3, random)


def _magnitudes(tiles: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scaled magnitudes, and the nearest magnitudes of E2M1."""
    magnitude = (tiles * factor[:, None, :, None]).abs()
    return magnitude, casts.E2M1_VALUES.to(tiles.device)[_nearest(magnitude)]


def _block_sums(tiles: torch.Tensor) -> torch.Tensor:
    """`fp8jax.quantization.fp4.block_sums` of products."""
    tiles = tiles.clamp(max=fp4.SETTLED)
    for axis in (3, 1):
        while tiles.shape[axis] > 1:
            low, high = tiles.chunk(2, axis)
            tiles = low + high
    return tiles[:, 0, :, 0]


def rotated(
    x: Float[torch.Tensor, "rows columns"], signs: Float32[torch.Tensor, "128"]
) -> Float32[torch.Tensor, "rows columns"]:
    """`fp8jax.quantization.fp4.rotated`: each 128 columns times a random orthogonal matrix."""
    y = x.float() * signs.repeat(x.shape[1] // fp4.ROTATION)
    return _butterflies(y, fp4.ROTATION) * float(np.float32(fp4.ROTATION**-0.5))


def hadamard(x: Float[torch.Tensor, "rows columns"]) -> Float[torch.Tensor, "rows columns"]:
    """`fp8jax.quantization.hadamard`: each 16 columns times an orthogonal matrix."""
    rows, columns = x.shape
    y = x.float().view(rows, columns // 16, 16) * torch.from_numpy(SIGNS).to(x.device)
    y = _butterflies(y.view(rows, columns), 16) * 0.25
    return y.to(torch.float32 if x.dtype == torch.float16 else x.dtype)


def _butterflies(x: torch.Tensor, size: int) -> torch.Tensor:
    (rows, columns), width = x.shape, size // 2
    while width:
        low, high = x.view(rows, columns // (2 * width), 2, width).unbind(-2)
        x = torch.stack([low + high, low - high], -2)
        width //= 2
    return x.view(rows, columns)


def padded(x: torch.Tensor, method: BlockMethod, columns_of: int = 1) -> torch.Tensor:
    """`x` with zeros up to whole blocks, and to a multiple of `columns_of` columns, in row order."""
    (rows, columns), (to_rows, to_columns) = x.shape, method.padded(tuple(x.shape))
    to_columns += -to_columns % columns_of
    return torch.nn.functional.pad(x, (0, to_columns - columns, 0, to_rows - rows)).contiguous()
