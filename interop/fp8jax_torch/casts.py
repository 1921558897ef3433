"""Casts and scales on torch tensors, bit for bit those of `fp8jax.quantization`, which gives the reasons.

Casts saturate; NaN stays NaN. An amax that is zero, subnormal, infinite or NaN gives scale 1.
"""

import torch
from jaxtyping import Bool, Float, Int32

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.quantization import MAX_SCALE, MIN_SCALE
from fp8jax.quantization.rounding import nan_code

_FLOAT32 = torch.finfo(torch.float32)

# E2M1's values in the order of their codes.
E2M1_VALUES = torch.tensor(
    [sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], dtype=torch.float32, device="cpu"
)


def dtype_of(format: Format) -> torch.dtype:
    """torch's dtype of a format's codes."""
    return getattr(torch, format.dtype.name)


def format_of(dtype: torch.dtype) -> Format:
    """The format of codes with this dtype."""
    return next(format for format in formats.ALL if f"torch.{format.dtype.name}" == str(dtype))


def check_format(format: Format) -> None:
    """Raises ValueError for a format that no tensor is quantized to."""
    reasons = {
        "E8M0": "which is for scales",
        "E4M4": "which is for second moments",
        "E2M1": "for which torch has no dtype with an entry for each code",
    }
    if format.name in reasons:
        raise ValueError(
            f"`format`: expected a format of tensors; got {format.name}, {reasons[format.name]}."
        )


def checked_scale(scale: Float[torch.Tensor, ""]) -> Float[torch.Tensor, ""]:
    """The scale. Raises ValueError if it is illegal, except on a device, where reading it would wait."""
    is_read = type(scale) is torch.Tensor and scale.device.type == "cpu" and scale.ndim == 0
    if is_read and not MIN_SCALE <= scale.item() <= MAX_SCALE:
        raise ValueError(
            f"`scale`: expected a finite, positive, normal number, up to 2**126; got {scale.item():g}."
        )
    return scale


def cast(x: Float[torch.Tensor, "..."], format: Format) -> Float[torch.Tensor, "..."]:
    """float32 `x` to the codes of `format`: to nearest even, saturating; NaN stays NaN."""
    return x.clamp(-format.max, format.max).to(dtype_of(format))


def cast_stochastically(
    x: Float[torch.Tensor, "..."], format: Format, random: Int32[torch.Tensor, "..."]
) -> Float[torch.Tensor, "..."]:
    """float32 `x` to the codes of `format`, of 8 or 16 bits, by stochastic rounding with random bits."""
    integer = getattr(torch, f"int{format.bits}")
    return stochastic_codes(x, format, random).to(integer).view(dtype_of(format))


def stochastic_codes(
    x: Float[torch.Tensor, "..."], format: Format, random: Int32[torch.Tensor, "..."]
) -> Int32[torch.Tensor, "..."]:
    """`cast_stochastically` to a format of at most 16 bits, as codes in int32."""
    cut = 23 - format.mantissa_bits
    magnitude = x.abs().clamp_(max=format.max)
    is_subnormal = magnitude < format.smallest_normal
    # A float's bits in order; subnormal numbers of the format are in the binade of the least normal one.
    bits = magnitude.add_(is_subnormal, alpha=format.smallest_normal).view(torch.int32)
    bits.add_((random >> (32 - cut)).bitwise_and_(2**cut - 1))
    code = bits.bitwise_right_shift_(cut).bitwise_and_(2 ** (32 - cut) - 1)  # of a NaN without a sign
    code.sub_((127 - format.exponent_bias) << format.mantissa_bits)
    code.add_(is_subnormal, alpha=-(1 << format.mantissa_bits))
    return code.clamp_(max=nan_code(format)).bitwise_or_((x.view(torch.int32) >> 31) << (format.bits - 1))


def to_float(codes: Float[torch.Tensor, "..."]) -> Float[torch.Tensor, "..."]:
    """Codes as float32, exactly; of uint8, two codes of E2M1 in a byte, the first in the low four bits."""
    if codes.dtype == torch.uint8:
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        return E2M1_VALUES.to(pairs.device)[pairs.int()]
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu" or codes.numel() == 0:
        return codes.float()
    # torch's conversion on a CPU is scalar. Except for the exponent bias, E4M3's bits are those of a float16
    # shifted by seven; only E4M3's NaNs would become numbers.
    bits = codes.view(torch.int8)
    if (bits & 0x7F).max() == 0x7F:
        return codes.float()
    half = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return half.float().mul_(2.0 ** (formats.FP16.exponent_bias - formats.E4M3.exponent_bias))


def amax(x: Float[torch.Tensor, "..."]) -> Float[torch.Tensor, ""]:
    """Largest absolute value, float32: 0 for an empty tensor, inf where `x` contains inf or NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float().nan_to_num(nan=float("inf"), posinf=float("inf"))


def usable(amax: Float[torch.Tensor, "..."]) -> Bool[torch.Tensor, "..."]:
    """Whether an amax is positive, finite and not subnormal."""
    return (amax >= _FLOAT32.tiny) & (amax <= _FLOAT32.max)


def scale_of(
    amax: Float[torch.Tensor, "..."],
    limit: float | Float[torch.Tensor, "..."],
    *,
    margin: int = 0,
    power_of_two: bool = False,
    otherwise: float | Float[torch.Tensor, "..."] = 1.0,
) -> Float[torch.Tensor, "..."]:
    """`fp8jax.quantization.scale_of`: the scale that maps `amax`, float32, to `limit`, a format's max."""
    factor = factor_of(amax, limit, margin=margin, power_of_two=power_of_two)
    return torch.where(usable(amax), 1.0, otherwise) / factor


def factor_of(
    amax: Float[torch.Tensor, "..."],
    limit: float | Float[torch.Tensor, "..."],
    *,
    margin: int = 0,
    power_of_two: bool = False,
) -> Float[torch.Tensor, "..."]:
    """The reciprocal of `scale_of`; 1 where the amax is not `usable`."""
    limit = torch.as_tensor(limit, dtype=torch.float32, device=amax.device)
    if power_of_two:
        # One subtraction for exponents and fractions: a borrow from the exponent is the floor.
        exponent = (((limit.view(torch.int32) - amax.view(torch.int32)) >> 23) - margin).clamp(-126, 126)
        factor = ((exponent + 127) << 23).view(torch.float32)
    else:
        factor = (limit * 2.0**-margin / amax).clamp(MIN_SCALE, MAX_SCALE)
    return torch.where(usable(amax), factor, 1.0)
