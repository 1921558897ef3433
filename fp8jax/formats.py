"""Number formats as data: a dtype and the numbers that describe its codes.

    >>> from fp8jax import formats
    >>> formats.E4M3.max, formats.E4M3.smallest_subnormal
    (448.0, 0.001953125)
    >>> formats.get("FP16").bits
    16

`E4M3` is the variant without infinities (`float8_e4m3fn`), as in the OCP 8-bit floating point specification
and on NVIDIA hardware.

References:
    FP8 Formats for Deep Learning, arXiv 2209.05433, Table 1.
    OCP Microscaling Formats (MX) v1.0, section 5.3 (E2M1 is its FP4, E8M0 its shared exponent).
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: the name in recipes and reports.
        dtype: the NumPy dtype of the codes.
        bits: bits of a code.
        mantissa_bits: explicit fraction bits (E8M0 has none).
        exponent_bias: a normal number is (1 + fraction) * 2**(exponent - exponent_bias).
        max: largest finite value.
        smallest_normal: smallest positive value with full precision.
        smallest_subnormal: smallest positive value.
        has_infinity: whether there are codes of infinities.
    """

    name: str
    dtype: Any
    bits: int
    mantissa_bits: int
    exponent_bias: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_infinity: bool

    def __str__(self) -> str:
        return self.name


def _format(name: str, dtype: Any, exponent_bias: int, has_infinity: bool) -> Format:
    info = ml_dtypes.finfo(dtype)
    return Format(
        name=name,
        dtype=np.dtype(dtype),
        bits=info.bits,
        mantissa_bits=info.nmant,
        exponent_bias=exponent_bias,
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        has_infinity=has_infinity,
    )


E2M1 = _format("E2M1", ml_dtypes.float4_e2m1fn, 1, False)
E4M3 = _format("E4M3", ml_dtypes.float8_e4m3fn, 7, False)
E5M2 = _format("E5M2", ml_dtypes.float8_e5m2, 15, True)
E8M0 = _format("E8M0", ml_dtypes.float8_e8m0fnu, 127, False)
FP16 = _format("FP16", np.float16, 15, True)
BF16 = _format("BF16", ml_dtypes.bfloat16, 127, True)
FP32 = _format("FP32", np.float32, 127, True)

# A byte without a sign, for second moments: the exponents of E4M3, and one bit of mantissa more.
E4M4 = Format("E4M4", np.dtype(np.uint8), 8, 4, 7, 496.0, 2.0**-6, 2.0**-10, False)

# The formats whose dtype is theirs alone: all but E4M4, whose codes are integers.
ALL = (E2M1, E4M3, E5M2, E8M0, FP16, BF16, FP32)


def get(format: Format | str) -> Format:
    """The format with this name; a `Format` is returned unchanged.

    Raises:
        TypeError: `format` is neither a format nor a name, e.g. a dtype.
        ValueError: no format has this name.
    """
    if isinstance(format, Format):
        return format
    formats = {candidate.name: candidate for candidate in ALL}
    if format in formats:
        return formats[format]
    raise (ValueError if isinstance(format, str) else TypeError)(
        f"`format`: expected a format of `fp8jax.formats` or its name, one of {', '.join(formats)}; got "
        f"{format!r}."
    )
