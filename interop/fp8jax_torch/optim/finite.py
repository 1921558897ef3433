"""Whether gradients are finite, with one synchronization per device."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from fp8jax_torch import casts
from fp8jax_torch.scaled import is_scaled


def largest(grads: Iterable[torch.Tensor]) -> float:
    """The largest magnitude in gradients, plain, sparse, complex or scaled; inf where one is not finite."""
    ends: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        for end in _ends(grad):
            ends.setdefault((end.device, end.dtype), []).append(end)
    found = [torch.stack(each).abs().max().item() for each in ends.values()]
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf


def _ends(grad: Any) -> tuple[torch.Tensor, ...]:
    """Minimum and maximum of a gradient, NaN where it holds a NaN; the largest magnitude of a scaled one."""
    if is_scaled(grad):
        return (_amax_of_scaled(grad),)
    numbers = grad.detach()
    numbers = numbers._values() if numbers.is_sparse else numbers
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    return tuple(torch.aminmax(numbers)) if numbers.numel() else ()


def _amax_of_scaled(x: Any) -> torch.Tensor:
    codes = x.codes.contiguous()
    if codes.dtype != torch.float8_e4m3fn or not codes.numel():
        return casts.amax(codes) * x.scale
    # As bytes without the sign, E4M3 codes have the order of their magnitudes, with NaN above all. The
    # largest signed byte is the largest positive code, the largest unsigned byte the largest negative code.
    positive, negative = codes.view(torch.int8).max(), codes.view(torch.uint8).max() & 0x7F
    code = torch.maximum(positive.clamp(min=0).to(torch.uint8), negative)
    return code.view(torch.float8_e4m3fn).float() * x.scale
