"""GEMMs of operands in FP8 and in high precision.

On a GPU with FP8 tensor cores the GEMMs are `torch._scaled_mm`. Elsewhere the codes are multiplied in
float32, where each product is exact: the numbers are the same except for the order of the sums.
"""

import functools
from typing import Any

import torch
from jaxtyping import Float

from fp8jax_torch import casts
from fp8jax_torch.scaled import ScaledTensor, is_scaled, value

# Compute capability of the first of NVIDIA's GPUs with FP8 tensor cores: Ada 8.9, then Hopper 9.0.
_FP8_CAPABILITY = (8, 9)


def transposed(matrix: Any) -> Any:
    """The transpose, a view."""
    return ScaledTensor(matrix.codes.t(), matrix.scale) if is_scaled(matrix) else matrix.t()


def gemm(lhs: Any, rhs: Any, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """lhs (m, k) @ rhs (k, n), in FP8 if lhs is."""
    if not is_scaled(lhs):
        return high_gemm(lhs, value(rhs).to(lhs.dtype), dtype)
    if why_emulated(lhs.device) is None:
        return scaled_mm(lhs, rhs, dtype, fast=fast)
    out = casts.to_float(lhs.codes) @ casts.to_float(rhs.codes)
    # Two multiplications: the product of the scales alone can leave float32's range.
    return (out * lhs.scale * rhs.scale).to(dtype)


def high_gemm(lhs: torch.Tensor, rhs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """lhs (m, k) @ rhs (k, n), accumulated in float32 and cast once."""
    # torch has only this wider output, and only on a GPU.
    if lhs.is_cuda and lhs.dtype.itemsize == 2 and dtype == torch.float32:
        return torch.mm(lhs, rhs, out_dtype=dtype)
    common = torch.promote_types(lhs.dtype, dtype)
    return (lhs.to(common) @ rhs.to(common)).to(dtype)


def scaled_mm(
    lhs: ScaledTensor, rhs: ScaledTensor, dtype: torch.dtype, *, fast: bool
) -> Float[torch.Tensor, "m n"]:
    """lhs (m, k) @ rhs (k, n) by `torch._scaled_mm`, which takes lhs by rows, rhs by columns, and k and n in
    multiples of 16."""
    (m, k), n = lhs.shape, rhs.shape[1]
    a, b = _padded(lhs.codes, 1), _padded(rhs.codes.t(), 16)
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.t(), lhs.scale, rhs.scale, out_dtype=dtype, use_fast_accum=fast
    )
    return out[:m, :n] if k else out.zero_()


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
