"""Block scaling: the codes, scales and random bits of `fp8jax.scaling.block`, bit for bit.

    for_fprop = quantized(recipe, LHS, x, 0)  # x.shape=(m, k): blocks along k
    for_wgrad = quantized(recipe, LHS, x, 1)  # blocks along m

`fp8jax.scaling.block` says which operand has which blocks in which GEMM, and `fp8jax.quantization.blocks`
what blocks of zeros, and blocks with an infinity or NaN, become.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32

from fp8jax import formats
from fp8jax.quantization import BlockMethod
from fp8jax.quantization.blocks import SIGNS
from fp8jax.recipe import Recipe
from fp8jax.scaling import block
from fp8jax_torch import casts
from fp8jax_torch.random import leaf_seed, random_bits

# E2M1's magnitudes in the order of their codes. A midpoint of two goes to the even code.
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = torch.from_numpy(np.concatenate([_MAGNITUDES, -_MAGNITUDES]))
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_MIDPOINTS[1::2] = np.nextafter(_MIDPOINTS[1::2], np.float32(0))
_TIES = torch.from_numpy(_MIDPOINTS)


class Blocks(NamedTuple):
    """A matrix with a scale for each block.

    Attributes:
        codes: of the padded shape, E4M3 or E5M2; or uint8 with half the columns, two codes of E2M1 in a byte,
            the first in the low four bits.
        scale: of each block, float32, E8M0, or E4M3 on the scale of the matrix.
        of_matrix: float32, shape=(); None without one.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    of_matrix: torch.Tensor | None

    def dequantize(self) -> Float32[torch.Tensor, "rows columns"]:
        """The values, padded."""
        scale = self.scale.float() if self.of_matrix is None else self.scale.float() * self.of_matrix
        if self.codes.dtype == torch.uint8:
            pairs = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)
            codes = _VALUES.to(pairs.device)[pairs.int()]
        else:
            codes = casts.to_float(self.codes)
        if not codes.numel():
            return codes
        (rows, columns), (down, across) = codes.shape, scale.shape
        tiles = codes.view(down, rows // down, across, columns // across)
        return (tiles * scale[:, None, :, None]).view(rows, columns)


def quantized(
    recipe: Recipe,
    operand: int,
    x: Float[torch.Tensor, "rows columns"],
    gemm: int,
    key: Float32[torch.Tensor, "2"] | None = None,
) -> Blocks:
    """Operand number `operand` of a dot, input (m, k), weight (k, n) or output gradient (m, n), for a GEMM.

    Args:
        recipe: a recipe with block scaling.
        operand, x: the operand as a matrix, in high precision.
        gemm: 0 for the first GEMM of the operand, 1 for the second one.
        key: the seed and the number of steps, where the recipe rounds output gradients at random.

    Returns:
        The copy with the contracted axis last, padded to whole blocks.
    """
    method = block.method_of(recipe, operand)
    copy = _padded(turned(operand, x, gemm), method)
    is_of_wgrad = gemm == 1 and operand != block.RHS
    if recipe.gemm == "FP4" and is_of_wgrad and "hadamard" in recipe.fp4_options:
        copy = hadamard(copy)
    random = None
    if operand == block.GRAD and key is not None:
        seed, step = map(int, key)
        of_tensor = int(casts.amax(x).view(torch.int32))
        random = random_bits(leaf_seed((seed << 32) + of_tensor, step, gemm), 0, copy)
    return quantize_blocks(copy, method, random)


def turned(operand: int, x: torch.Tensor, gemm: int) -> torch.Tensor:
    """The operand with the axis last that its GEMM contracts."""
    return x.t() if (gemm == 1) != (operand == block.RHS) else x


def quantize_blocks(
    x: Float[torch.Tensor, "rows columns"],
    method: BlockMethod,
    random: Int32[torch.Tensor, "rows columns"] | None = None,
) -> Blocks:
    """`fp8jax.quantization.quantize_blocks`; random bits are for E2M1 codes."""
    x = _padded(x, method).float()
    (rows, columns), (height, width) = x.shape, method.block
    tiles = x.view(rows // height, height, columns // width, width)
    amax = tiles.abs().amax((1, 3)).nan_to_num(nan=math.inf, posinf=math.inf)
    factor, scale, of_matrix = _factors(amax, method)
    scaled = (tiles * factor[:, None, :, None]).view(rows, columns)
    if method.format != formats.E2M1:
        return Blocks(casts.cast(scaled, method.format), scale, of_matrix)
    if random is None:
        codes = torch.bucketize(scaled.abs(), _TIES.to(x.device), out_int32=True)
        codes.bitwise_or_((scaled.view(torch.int32) >> 31) << 3)
    else:
        codes = casts.stochastic_codes(scaled, method.format, random)
    codes = codes.masked_fill_(scaled == 0, 0).bitwise_and_(15).to(torch.uint8)  # zeros have no sign
    return Blocks(codes[:, ::2] | codes[:, 1::2] << 4, scale, of_matrix)


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


def check_device(device: torch.device) -> None:
    """Raises RuntimeError on a GPU: no block-scaled GEMM of torch was tried there."""
    if device.type not in ("cpu", "meta"):
        raise RuntimeError(
            "`recipe`: block scaling on torch runs on a CPU, emulated exactly, and has no GEMMs for GPUs; "
            f'got {device.type}. Use the recipe "te,scaling=current", or backend="torchao" with mxfp8, '
            "nvfp4 or block,scaling=block_float32."
        )


def hadamard(x: Float[torch.Tensor, "rows columns"]) -> Float[torch.Tensor, "rows columns"]:
    """`fp8jax.quantization.hadamard`: each 16 columns times an orthogonal matrix."""
    rows, columns = x.shape
    y = x.float().view(rows, columns // 16, 16) * torch.from_numpy(SIGNS).to(x.device)
    for width in (8, 4, 2, 1):
        low, high = y.view(rows, columns // (2 * width), 2, width).unbind(-2)
        y = torch.stack([low + high, low - high], -2)
    return (y * 0.25).view(rows, columns).to(torch.float32 if x.dtype == torch.float16 else x.dtype)


def _padded(x: torch.Tensor, method: BlockMethod) -> torch.Tensor:
    """`x` with zeros up to whole blocks, in row order."""
    (rows, columns), (to_rows, to_columns) = x.shape, method.padded(tuple(x.shape))
    return torch.nn.functional.pad(x, (0, to_columns - columns, 0, to_rows - rows)).contiguous()
