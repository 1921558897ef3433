"""Each format's numbers against the specification's tables and its own codes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from fp8jax import formats

# OCP 8-bit Floating Point Specification (OFP8) v1.0 (E4M3, E5M2); OCP Microscaling Formats v1.0 (E2M1; E8M0:
# powers of two, neither sign nor zero); IEEE 754-2019, Table 3.5 (binary16, binary32); bfloat16 is binary32
# cut off after 7 fraction bits.
# bits, fraction bits, bias, largest, smallest normal, smallest subnormal, infinity
SPECIFIED = {
    "E2M1": (4, 1, 1, 6.0, 1.0, 0.5, False),
    "E4M3": (8, 3, 7, 448.0, 2.0**-6, 2.0**-9, False),
    "E5M2": (8, 2, 15, 57344.0, 2.0**-14, 2.0**-16, True),
    "E8M0": (8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, False),
    "FP16": (16, 10, 15, 65504.0, 2.0**-14, 2.0**-24, True),
    "BF16": (16, 7, 127, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, True),
    "FP32": (32, 23, 127, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, True),
}
DTYPES = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E8M0": ml_dtypes.float8_e8m0fnu,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP32": np.float32,
}
FLOATS = [f for f in formats.ALL if f.bits <= 16 and f.name != "E8M0"]


@pytest.mark.parametrize("name", SPECIFIED)
def test_numbers_are_those_of_the_specification(name):
    format = formats.get(name)
    assert dataclasses.astuple(format) == (name, np.dtype(DTYPES[name]), *SPECIFIED[name])


@pytest.mark.parametrize("format", FLOATS, ids=str)
def test_values_of_all_codes(format):
    """Each code has the value that bias and fraction bits define."""
    codes = np.arange(2**format.bits, dtype=np.uint16 if format.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # numpy warns of a signaling NaN's cast
        values = codes.view(format.dtype).astype(np.float64)
    wide = codes.astype(np.int64)
    fraction = (wide & (2**format.mantissa_bits - 1)) / 2**format.mantissa_bits
    exponent = (wide & (2 ** (format.bits - 1) - 1)) >> format.mantissa_bits
    sign = np.where(wide >> (format.bits - 1), -1.0, 1.0)
    normal = (1 + fraction) * 2.0 ** (exponent - format.exponent_bias)
    subnormal = fraction * 2.0 ** (1 - format.exponent_bias)
    finite = np.isfinite(values)
    expected = sign * np.where(exponent > 0, normal, subnormal)
    np.testing.assert_array_equal(values[finite], expected[finite])
    assert values[finite].max() == format.max
    assert values[finite & (values > 0)].min() == format.smallest_subnormal
    assert np.isinf(values).any() == format.has_infinity
    # NaN and infinity are the codes above the largest, and no others; E2M1 has neither.
    assert (np.abs(expected[~finite]) > format.max).all()


def test_a_format_is_a_frozen_value_found_by_name():
    assert [str(f) for f in formats.ALL] == list(SPECIFIED)
    for format in formats.ALL:
        assert formats.get(format.name) is format and hash(format) == hash(dataclasses.replace(format))
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.E4M3.max = 240.0


@pytest.mark.parametrize("name", ["FP8", "e4m3", "", None, np.float16])
def test_an_unknown_name_raises_and_lists_the_formats(name):
    error = ValueError if isinstance(name, str) else TypeError
    with pytest.raises(error, match=rf"`format`: expected .* one of E2M1, E4M3, .*, FP32; got {name!r}"):
        formats.get(name)
