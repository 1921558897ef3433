"""GEMMs of operands in FP8 and in high precision.

On a GPU with FP8 tensor cores the GEMMs are `torch._scaled_mm`. Elsewhere the codes are multiplied in
float32, where each product is exact: the numbers are the same except for the order of the sums.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float

from fp8jax.scaling import GRAD, LHS, RHS
from fp8jax_torch import casts

# Compute capability of the first of NVIDIA's GPUs with FP8 tensor cores: Ada 8.9, then Hopper 9.0.
_FP8_CAPABILITY = (8, 9)


# The operands of each GEMM, and whether it is the first (0) or the second (1) of the operand's two GEMMs.
FPROP, DGRAD, WGRAD = GEMMS = ((LHS, 0), (RHS, 0)), ((GRAD, 0), (RHS, 1)), ((LHS, 1), (GRAD, 1))


class Operand(NamedTuple):
    """A matrix to multiply, in high precision or quantized.

    Attributes:
        data: the matrix, in high precision or as codes with one scale; or codes with a scale for each block,
            padded, with the axis last that the GEMM contracts. Codes of E2M1 are pairs, see `casts.to_float`.
        scale: None in high precision; float32, shape=(); or a scale for each block, in float32, E8M0 or E4M3.
        matrix_scale: factor of the scales of blocks, float32, shape=(); None is 1.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    matrix_scale: torch.Tensor | None = None

    def dequantize(self) -> Float[torch.Tensor, "rows columns"]:
        """The matrix in high precision, of codes in float32; in blocks it is padded."""
        if self.scale is None:
            return self.data
        codes, scale = casts.to_float(self.data), self.scale.float()
        if not (scale.ndim and codes.numel()):
            return codes * scale if not scale.ndim else codes
        scale = scale if self.matrix_scale is None else scale * self.matrix_scale
        (rows, columns), (down, across) = codes.shape, scale.shape
        tiles = codes.view(down, rows // down, across, columns // across)
        return (tiles * scale[:, None, :, None]).view(rows, columns)

    def contracted_last(self, operand: int, use: int) -> "Operand":
        """Operand number `operand`, input (m, k), weight (k, n) or output gradient (m, n), with the axis last
        that its first GEMM (`use` 0) or its second one (1) contracts; blocks as they are."""
        is_last = (use == 1) == (operand == RHS) or (self.scale is not None and self.scale.ndim)
        return self if is_last else self._replace(data=self.data.t())


def gemm(
    lhs: Operand, rhs: Operand, pairs: Sequence[tuple[int, int]], shape: tuple[int, ...], dtype: torch.dtype
) -> Float[torch.Tensor, "m n"]:
    """The GEMM of two operands, in FP8 or in high precision as they are.

    Args:
        lhs, rhs: the operands.
        pairs: one of `GEMMS`; reversed for the transpose of its result.
        shape, dtype: those of the result.
    """
    lhs, rhs = lhs.contracted_last(*pairs[0]), rhs.contracted_last(*pairs[1])
    if lhs.scale is None or lhs.scale.ndim or rhs.scale is None:
        out = _high_gemm(lhs.dequantize(), rhs.dequantize().t(), dtype)
    elif why_emulated(lhs.data.device) is None:
        out = _scaled_mm(lhs, rhs, dtype, fast=pairs == FPROP)
    else:
        out = casts.to_float(lhs.data) @ casts.to_float(rhs.data).t()
        # Two multiplications: the product of the scales alone can leave float32's range.
        out = (out * lhs.scale * rhs.scale).to(dtype)
    # Detached: a view that an autograd function returns could not be written in place.
    return out if out.shape == shape else out[: shape[0], : shape[1]].detach()


def _high_gemm(lhs: torch.Tensor, rhs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """lhs (m, k) @ rhs (k, n), accumulated in float32 and cast once."""
    # torch has only this wider output, and only on a GPU.
    if lhs.is_cuda and lhs.dtype.itemsize == 2 and dtype == torch.float32:
        return torch.mm(lhs, rhs, out_dtype=dtype)
    common = torch.promote_types(lhs.dtype, dtype)
    return (lhs.to(common) @ rhs.to(common)).to(dtype)


def _scaled_mm(lhs: Any, rhs: Any, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """lhs (m, k) @ rhs (n, k).T by `torch._scaled_mm`; n is padded to a multiple of 16, which it needs."""
    a, b = _padded(lhs.data, 1), _padded(rhs.data, 16)
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.t(), lhs.scale, rhs.scale, out_dtype=dtype, use_fast_accum=fast
    )
    return out if a.shape[1] else out.zero_()


def _padded(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """The codes in row order, padded by zeros to multiples of `rows` rows and 16 columns."""
    codes, pad = codes.contiguous(), (0, -codes.shape[1] % 16, 0, -codes.shape[0] % rows)
    return torch.nn.functional.pad(codes.view(torch.uint8), pad).view(codes.dtype) if any(pad) else codes


@functools.cache
def why_emulated(device: torch.device) -> str | None:
    """The reason why FP8 GEMMs are emulated on the device, or None."""
    reason = "FP8 was not tried with ROCm" if torch.version.hip else why_no_fp8("FP8", device)
    return f"FP8 GEMMs are emulated, exactly: {reason}" if reason else None


def why_no_fp8(name: str, device: torch.device, needed: tuple[int, int] = _FP8_CAPABILITY) -> str | None:
    """The reason why the device is no GPU of the compute capability that `name` needs; or None."""
    if device.type != "cuda":
        return f"{name} needs a CUDA device; got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= needed:
        return None
    least, got = (".".join(map(str, c)) for c in (needed, capability))
    gpu = torch.cuda.get_device_name(device)
    return f"{name} needs compute capability {least} or higher; got {got} ({gpu})"
