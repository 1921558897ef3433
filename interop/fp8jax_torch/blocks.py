"""Blocks of a matrix: the codes and scales of `fp8jax.quantization.quantize_blocks`, bit for bit.

`fp8jax.quantization.blocks` says what blocks of zeros, and blocks with an infinity or NaN, become.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32

from fp8jax import formats
from fp8jax.quantization import BlockMethod
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
    """`fp8jax.quantization.quantize_blocks`; random bits are for E2M1 codes."""
    x = padded(x, method).float()
    (rows, columns), (height, width) = x.shape, method.block
    tiles = x.view(rows // height, height, columns // width, width)
    amax = tiles.abs().amax((1, 3)).nan_to_num(nan=math.inf, posinf=math.inf)
    factor, scale, matrix_scale = _factors(amax, method)
    scaled = (tiles * factor[:, None, :, None]).view(rows, columns)
    if method.format != formats.E2M1:
        return Operand(casts.cast(scaled, method.format), scale, matrix_scale)
    if random is None:
        codes = torch.bucketize(scaled.abs(), _TIES.to(x.device), out_int32=True)
        codes.bitwise_or_((scaled.view(torch.int32) >> 31) << 3)
    else:
        codes = casts.stochastic_codes(scaled, method.format, random)
    codes = codes.masked_fill_(scaled == 0, 0).bitwise_and_(15).to(torch.uint8)  # zeros have no sign
    return Operand(codes[:, ::2] | codes[:, 1::2] << 4, scale, matrix_scale)


def _factors(
    amax: Float32[torch.Tensor, "down across"], method: BlockMethod
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
        largest = casts.amax(amax)
        encode = casts.factor_of(largest, limit * formats.E4M3.max)
        encode = encode.masked_fill(largest == math.inf, math.nan)
        decode = 1 / encode
        scale = casts.cast(amax * (encode * float(1 / np.float32(limit))), formats.E4M3)
        return (1 / (scale.float() * decode)).clamp(max=torch.finfo(torch.float32).max), scale, decode
    factor = casts.factor_of(amax, limit, power_of_two=method.scale == "power_of_two")
    factor = factor.masked_fill(is_bad, math.nan)
    return factor, 1 / factor, None


def hadamard(x: Float[torch.Tensor, "rows columns"]) -> Float[torch.Tensor, "rows columns"]:
    """`fp8jax.quantization.hadamard`: each 16 columns times an orthogonal matrix."""
    rows, columns = x.shape
    y = x.float().view(rows, columns // 16, 16) * torch.from_numpy(SIGNS).to(x.device)
    for width in (8, 4, 2, 1):
        low, high = y.view(rows, columns // (2 * width), 2, width).unbind(-2)
        y = torch.stack([low + high, low - high], -2)
    return (y * 0.25).view(rows, columns).to(torch.float32 if x.dtype == torch.float16 else x.dtype)


def padded(x: torch.Tensor, method: BlockMethod) -> torch.Tensor:
    """`x` with zeros up to whole blocks, in row order."""
    (rows, columns), (to_rows, to_columns) = x.shape, method.padded(tuple(x.shape))
    return torch.nn.functional.pad(x, (0, to_columns - columns, 0, to_rows - rows)).contiguous()
