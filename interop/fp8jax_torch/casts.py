"""Casts and scales on torch tensors, bit for bit those of `fp8jax.quantization`.

Casts round to nearest even and saturate; NaN stays NaN. An amax that is not usable gives scale 1. See
`fp8jax.quantization` for the reasons.
"""

from typing import Any

import torch

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.quantization import MAX_SCALE, MIN_SCALE

_DTYPES = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
}
_FLOAT32 = torch.finfo(torch.float32)
# The factor from a float16 with the bits of an E4M3 code to the code's value: the difference of exponent
# biases.
BIAS_OF_HALF = 2.0 ** (15 - 7)


def dtype_of(format: Format) -> torch.dtype:
    """torch's dtype of a format's codes."""
    return _DTYPES[format.name]


def format_of(dtype: torch.dtype) -> Format:
    """The format whose codes have this dtype."""
    return formats.get(next(name for name, candidate in _DTYPES.items() if candidate == dtype))


def cast(x: torch.Tensor, format: Format) -> torch.Tensor:
    """float32 `x` to the codes of `format`: to nearest even, saturating, NaN kept."""
    return x.clamp(-format.max, format.max).to(dtype_of(format))


def to_float(codes: torch.Tensor) -> torch.Tensor:
    """Codes as float32, exactly."""
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu" or codes.numel() == 0:
        return codes.float()
    # torch's conversion on a CPU is scalar. Except for the exponent bias, E4M3's bits are those of a float16
    # shifted by seven; only E4M3's NaNs would become numbers.
    bits = codes.view(torch.int8)
    if (bits & 0x7F).max() == 0x7F:
        return codes.float()
    wide = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return wide.view(torch.float16).float().mul_(BIAS_OF_HALF)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest absolute value, float32, shape (): 0 for an empty tensor, inf where there is inf or NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float().nan_to_num(nan=float("inf"), posinf=float("inf"))


def usable(amax: torch.Tensor) -> torch.Tensor:
    """Whether an amax is positive, finite and not subnormal."""
    return (amax >= _FLOAT32.tiny) & (amax <= _FLOAT32.max)


def scale_of(
    amax: torch.Tensor,
    limit: Any,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    otherwise: Any = 1.0,
) -> torch.Tensor:
    """`fp8jax.quantization.scale_of`: the scale that maps `amax`, float32, to `limit`, a format's max."""
    known = usable(amax)
    factor = factor_of(amax, limit, margin=margin, power_of_two=power_of_two)
    return torch.where(known, 1.0, otherwise) / torch.where(known, factor, 1.0)


def factor_of(amax: torch.Tensor, limit: Any, *, margin: int = 0, power_of_two: bool = False) -> torch.Tensor:
    """The reciprocal of `scale_of` for a usable amax, else any number."""
    limit = torch.as_tensor(limit, dtype=torch.float32, device=amax.device)
    if power_of_two:
        # One subtraction for exponents and fractions: a borrow from the exponent is the floor.
        bits = limit.view(torch.int32) - amax.view(torch.int32)
        exponent = ((bits >> 23) - margin).clamp(-126, 126)
        return ((exponent + 127) << 23).view(torch.float32)
    return (limit * 2.0**-margin / amax).clamp(MIN_SCALE, MAX_SCALE)


def without_infinities(x: torch.Tensor) -> torch.Tensor:
    """`x` with NaN for inf, which saturated would look like a large number."""
    return torch.where(x.isfinite(), x, torch.nan)
