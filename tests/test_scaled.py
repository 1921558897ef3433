"""Casts, scales and ScaledArray: bit for bit against ml_dtypes, exact fractions and loops."""

import fractions
import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax import ScaledArray, formats, quantize
from fp8jax.quantization import (
    MAX_SCALE,
    MIN_SCALE,
    amax,
    cast,
    expand,
    quantize_gradient,
    scale_of,
    usable,
)
from fp8jax.quantization.rounding import _cast_natively

FP8 = (formats.E4M3, formats.E5M2)
TARGETS = (*FP8, formats.FP16, formats.BF16)
FLT_MAX, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
INF, NAN = np.inf, np.nan
# Half the distance of the two largest codes.
HALF_ULP = {"E4M3": 16.0, "E5M2": 4096.0, "FP16": 16.0, "BF16": 2.0**119}


@functools.cache
def jitted(function, **static):
    return jax.jit(functools.partial(function, **static))


def bits(codes):
    """Codes as integers: what is compared bit for bit. NaNs, of any sign and payload, become one."""
    codes = np.asarray(codes)
    integers = codes.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[codes.dtype.itemsize]).astype(np.int64)
    return np.where(np.isnan(codes.astype(np.float32)), -1, integers)


def clipped_cast(x, format):
    """The referee: float32, clipped, rounded by ml_dtypes."""
    top = np.float32(format.max)
    with np.errstate(invalid="ignore"):
        return np.clip(np.asarray(x).astype(np.float32), -top, top).astype(format.dtype)


def critical_values(format):
    """float32: all finite codes of `format`, the midpoints between neighbours, the edges, and both float
    neighbours of each of these, all with both signs."""
    integers = np.arange(2 ** (format.bits - 1), dtype={8: np.uint8, 16: np.uint16}[format.bits])
    codes = integers.view(format.dtype).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    last_step = codes[-1] - codes[-2]
    midpoints = (codes[1:] + codes[:-1]) / 2
    edges = [0.0, 1e-45, 1e-40, TINY, FLT_MAX, INF, NAN, codes[-1] + last_step / 2, codes[-1] + last_step]
    x = np.concatenate([codes, midpoints, edges]).astype(np.float32)
    with np.errstate(over="ignore"):
        x = np.concatenate([x, np.nextafter(x, np.float32(INF)), np.nextafter(x, np.float32(-INF))])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("format", (*FP8, formats.FP16), ids=str)
@pytest.mark.parametrize("way", [cast, _cast_natively])
def test_casts_bit_for_bit(way, format):
    """Of all codes, midpoints, edges and arbitrary bits."""
    any_bits = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32).view(np.float32)
    x = np.concatenate([critical_values(format), any_bits])
    expected = clipped_cast(x, format)
    np.testing.assert_array_equal(bits(jitted(way, format=format)(x)), bits(expected))
    # Every code but infinity is among them, with NaN counted once.
    infinities = 2 if format.has_infinity else 0
    nans = np.isnan(
        np.arange(2**format.bits, dtype=np.uint16).astype(f"u{format.bits // 8}").view(format.dtype)
    )
    assert np.unique(bits(expected)).size == 2**format.bits - infinities - nans.sum() + 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("format", FP8, ids=str)
def test_every_narrow_float_is_quantized_bit_for_bit(dtype, format):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    q = jitted(quantize, format=format)(x, scale=np.float32(1))
    assert q.data.dtype == format.dtype
    np.testing.assert_array_equal(bits(q.data), bits(clipped_cast(x, format)))


@pytest.mark.parametrize("format", TARGETS, ids=str)
def test_a_cast_saturates_keeps_nan_and_the_sign_of_zero(format):
    top = np.float32(format.max)
    x = np.float32([top, np.nextafter(top, np.float32(INF)), FLT_MAX, INF, -INF, NAN, 0.0, -0.0])
    got = np.asarray(cast(jnp.asarray(x), format)).astype(np.float32)
    np.testing.assert_array_equal(got, [top, top, top, top, -top, NAN, 0.0, -0.0])
    np.testing.assert_array_equal(np.signbit(got[6:]), [False, True])


# Scales ##########################################################################################


def all_amaxes():
    """Every power of two of float32 with its neighbours, and mantissas in between."""
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))
    x = np.concatenate([powers * np.float32(m) for m in (1, 1.25, 1.75, 1.9)]).astype(np.float32)
    x = np.concatenate(
        [x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(INF)), [1e-45, FLT_MAX]]
    )
    return x[(x > 0) & np.isfinite(x)].astype(np.float32)


def msamp_scale(amax, limit, margin):
    """MS-AMP's rule in exact fractions, kept within the range of scales; 1 for a subnormal amax."""
    if amax < TINY:
        return 1.0
    ratio = fractions.Fraction(float(limit)) / fractions.Fraction(float(amax))
    exponent = ratio.numerator.bit_length() - ratio.denominator.bit_length()
    exponent -= fractions.Fraction(2) ** exponent > ratio  # now floor(log2(ratio))
    return 2.0 ** -min(max(exponent - margin, -126), 126)


@pytest.mark.parametrize("margin", [0, 1, 10, 100])
@pytest.mark.parametrize("format", FP8 + (formats.FP16,), ids=str)
def test_power_of_two_scales_are_msamps_rule_exactly(format, margin):
    x = all_amaxes()
    got = scale_of(jnp.asarray(x), format.max, margin=margin, power_of_two=True)
    np.testing.assert_array_equal(got, [msamp_scale(a, format.max, margin) for a in x])


def test_msamps_own_examples():
    """Its factors, the reciprocals: amax 1 -> 256, 448 -> 1, 449 -> 0.5 for E4M3."""
    got = scale_of(jnp.float32([1, 448, 449]), formats.E4M3.max, power_of_two=True)
    np.testing.assert_array_equal(1 / got, [256, 1, 0.5])


@pytest.mark.parametrize("margin", [0, 1, 10, 100])
@pytest.mark.parametrize("format", TARGETS, ids=str)
def test_a_scale_maps_amax_to_the_top_of_the_format(format, margin):
    x = all_amaxes()
    got = np.asarray(scale_of(jnp.asarray(x), format.max, margin=margin))
    # Two roundings: of the quotient and of its reciprocal. 2**-126 and 2**126 bound every scale.
    exact = np.clip(x.astype(np.float64) / format.max * 2.0**margin, MIN_SCALE, MAX_SCALE)
    exact = np.where(x < TINY, 1.0, exact)
    np.testing.assert_allclose(got, exact, rtol=2 * 2.0**-24 + 2.0**-46, atol=0)


@hypothesis.given(
    amaxes=hnp.arrays(np.float32, 16, elements=st.floats(0, INF, width=32) | st.just(NAN)),
    margin=st.integers(0, 100),
    power_of_two=st.booleans(),
    format=st.sampled_from(TARGETS),
)
@hypothesis.settings(max_examples=100)
def test_scales_and_their_reciprocals(amaxes, margin, power_of_two, format):
    """Both are finite, positive and normal."""
    got = scale_of(jnp.asarray(amaxes), format.max, margin=margin, power_of_two=power_of_two)
    got = np.asarray(got)
    assert got.dtype == np.float32
    for x in (got, 1 / got):
        assert (np.isfinite(x) & (x >= TINY)).all()
    silent = ~((amaxes >= TINY) & (amaxes <= FLT_MAX))
    np.testing.assert_array_equal(got[silent], 1)
    np.testing.assert_array_equal(usable(jnp.asarray(amaxes)), ~silent)
    if power_of_two:
        assert (np.frexp(got)[0] == 0.5).all()


def test_scale_of_otherwise():
    """The scale of an amax of zero, inf or NaN is the argument `otherwise`."""
    silent = jnp.float32([0, 1e-40, INF, NAN, 448])
    np.testing.assert_array_equal(scale_of(silent, 448.0, otherwise=0.25), [0.25] * 4 + [1])
    np.testing.assert_array_equal(scale_of(silent, 448.0, otherwise=jnp.arange(5.0) + 7), [7, 8, 9, 10, 1])
    limits = jnp.float32([448, 448, 448, 448, 57344])
    np.testing.assert_array_equal(scale_of(jnp.full(5, 448.0), limits), np.float32([1, 1, 1, 1, 1 / 128]))


# quantize ########################################################################################


# format, power_of_two, margin
WAYS = [
    (formats.E4M3, False, 0),
    (formats.E4M3, True, 3),
    (formats.E5M2, True, 0),
    (formats.FP16, True, 0),
    (formats.BF16, False, 0),
]


def quantizer(format, power_of_two, margin):
    return jitted(quantize, format=format, power_of_two=power_of_two, margin=margin)


@hypothesis.given(
    x=hnp.arrays(np.float32, 32, elements=st.floats(-(2.0**127), 2.0**127, width=32)),
    way=st.sampled_from(WAYS),
)
@hypothesis.settings(max_examples=100)
def test_largest_rounding_error(x, way):
    """At most half an ulp at the format's max, times the scale."""
    q, format = quantizer(*way)(x), way[0]
    scale = float(q.scale)
    # x / scale is computed with two roundings, and the largest may land two above max, to be clipped to it.
    # A float below 2**-126 may be flushed to zero, which is less than half an ulp of any format here.
    bound = scale * (HALF_ULP[format.name] + format.max * 2.0**-22)
    assert np.abs(x - np.asarray(q.data).astype(np.float64) * scale).max() <= bound


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", [formats.E4M3, formats.E5M2, formats.FP16, formats.BF16], ids=str)
def test_what_is_finite_stays_so(format, power_of_two):
    """Up to float32's max, whose code may be rounded up, and its value would be beyond it."""
    x = np.float32([FLT_MAX, -FLT_MAX, FLT_MAX * 0.99, FLT_MAX / 2, 1])
    for margin in (0, 3):
        q = quantizer(format, power_of_two, margin)(x)
        np.testing.assert_allclose(q.dequantize(), x, rtol=1 / 8, atol=float(q.scale))


def test_a_format_has_a_name():
    x = jnp.ones((2, 3))
    jax.tree.map(np.testing.assert_array_equal, quantize(x, "E5M2"), quantize(x, formats.E5M2))
    for bad, error in (("e4m3", ValueError), (jnp.float8_e4m3fn, TypeError)):
        with pytest.raises(error, match="`format`: expected .* one of E2M1, E4M3, E5M2, .*; got .*e4m3"):
            quantize(x, bad)


@pytest.mark.parametrize("way", [way for way in WAYS if way[2] == 0], ids=lambda way: str(way[0]))
def test_the_bound_is_tight(way):
    format = way[0]
    x = np.zeros(32, np.float32)
    x[:2] = format.max, format.max - HALF_ULP[format.name]
    q = quantizer(*way)(x)
    assert q.scale == 1
    assert abs(x[1] - np.float32(q.data[1])) == HALF_ULP[format.name]


@pytest.mark.parametrize(
    "format, dtype",
    [
        (formats.E4M3, np.float32),
        (formats.E4M3, ml_dtypes.bfloat16),
        (formats.E5M2, np.float16),
        (formats.FP16, np.float32),
        (formats.BF16, np.float32),
        (formats.FP32, np.float32),
    ],
    ids=str,
)
def test_quantize_is_what_its_docstring_says_bit_for_bit(format, dtype):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(dtype)
    for scale in (0.003, 2.0**-5, 7.0):
        q = jitted(quantize, format=format)(x, scale=np.float32(scale))
        quotient = np.asarray(x).astype(np.float32) * (np.float32(1) / np.float32(scale))
        np.testing.assert_array_equal(bits(q.data), bits(clipped_cast(quotient, format)))
        assert q.scale == np.float32(scale) and q.scale.dtype == jnp.float32
    if format == formats.FP32:  # as fine as the arithmetic: the product rounds
        return
    again = quantize(q, format, q.scale)
    np.testing.assert_array_equal(bits(again.data), bits(q.data))


# What goes in, what comes out, on which scale; for E4M3.
SPECIAL = {
    "zeros": ([0.0, -0.0, 0.0], [0.0, -0.0, 0.0], 1),
    "subnormal": ([1e-40, -1e-45, 0.0], [0.0, -0.0, 0.0], 1),
    "a subnormal among normals": ([1e-40, 448.0, 1.0], [0.0, 448.0, 1.0], 1),
    "inf": ([INF, 1.0, -1000.0], [448.0, 1.0, -448.0], 1),
    "-inf": ([-INF, 3.0, 500.0], [-448.0, 3.0, 448.0], 1),
    "nan": ([NAN, 1.0, 1000.0], [NAN, 1.0, 448.0], 1),
    "inf and nan": ([INF, NAN, 2.0], [448.0, NAN, 2.0], 1),
    "smallest normal": ([TINY, -TINY, 0.0], [1.0, -1.0, 0.0], MIN_SCALE),
    "largest": ([2.0**127, -(2.0**127), 0.0], [448.0, -448.0, 0.0], 2.0**127 / 448),
    "empty": ([], [], 1),
    "scalar": (-3.0, -448.0, 3 / 448),
    "scalar zero": (0.0, 0.0, 1),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_inputs(name, strict_dtypes):
    x, codes, scale = SPECIAL[name]
    q = jitted(quantize, format=formats.E4M3)(np.float32(x))
    got = np.asarray(q.data).astype(np.float32)
    np.testing.assert_array_equal(got, np.float32(codes))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.float32(codes)))
    np.testing.assert_allclose(q.scale, scale, rtol=2.0**-23)
    assert q.shape == np.shape(x) and q.scale.shape == () and q.data.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(q.dequantize()), np.float32(got * np.float32(q.scale)))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_nan_in_e2m1(scale):
    """No code of E2M1 is NaN, so the scale of the block is."""
    x = np.float32([[NAN, 1, 2], [1, -2, INF], [0, 3, -6]])
    scales = None if scale is None else jnp.full((3, 1), scale)
    got = jitted(quantize, format="E2M1", blocks=(3, 1))(x, scale=scales).dequantize()
    top = 6.0 * (scale or 1)
    expected = [[NAN] * 3, [1, -2, top], [0, 3, -6] if scale is None else [0, 3, -3]]
    np.testing.assert_array_equal(got, np.float32(expected))
    assert np.isnan(quantize(x, "E2M1", scale).dequantize()).all()
    assert np.isfinite(quantize(x[1:], "E2M1", scale).dequantize()).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_margin_leaves_headroom(power_of_two):
    x = jnp.float32([1.0, -0.3])
    q = quantize(x, formats.E4M3, margin=3, power_of_two=power_of_two)
    plain = quantize(x, formats.E4M3, power_of_two=power_of_two)
    assert float(q.scale) == 8 * float(plain.scale)
    assert float(jnp.max(jnp.abs(q.data.astype(jnp.float32)))) <= 448 / 8


def test_wrong_arguments_raise_and_say_what_fits():
    with pytest.raises(TypeError, match="`x`: expected a floating array to quantize; got int32"):
        quantize(jnp.ones(3, jnp.int32), formats.E4M3)
    for scale in (jnp.ones(3), jnp.ones((3, 1)), jnp.ones((4, 6, 1)), jnp.ones((2, 0))):
        with pytest.raises(ValueError, match=r"got data float32\[4, 6\], scale float32\["):
            quantize(jnp.ones((4, 6)), formats.E4M3, scale)


@pytest.mark.parametrize("format", ["E4M4", None, jnp.float8_e4m3fn])
def test_what_is_no_format_is_refused(format):
    with pytest.raises(
        (TypeError, ValueError), match="`format`: expected a format .* one of E2M1, E4M3, .*; got "
    ):
        quantize(jnp.ones(3), format)


@pytest.mark.parametrize("format", [formats.E8M0, formats.E4M4])
def test_a_format_without_a_sign_is_refused(format):
    with pytest.raises(ValueError, match=f"expected a format with a sign; got {format.name}, which is for"):
        quantize(jnp.ones(3), format)


@pytest.mark.parametrize("blocks", [2, (-1, 1), (2.0, 1), "ab"])
def test_blocks_that_are_no_shape(blocks):
    with pytest.raises(TypeError, match="`blocks`: expected a shape; got "):
        quantize(jnp.ones((4, 6)), formats.E4M3, blocks=blocks)


def test_blocks_may_be_a_list_or_integers_of_numpy():
    for blocks in ([2, 1], (np.int64(2), 1)):
        assert quantize(jnp.ones((4, 6)), formats.E4M3, blocks=blocks).scale.shape == (2, 1)


@pytest.mark.parametrize("blocks", [(3, 1), (8, 1), (2,), (2, 3, 1), (0, 1)])
def test_blocks_that_do_not_fit_raise_and_say_so(blocks):
    with pytest.raises(ValueError, match=r"a float32 scale, scalar or of the data's rank"):
        quantize(jnp.ones((4, 6)), formats.E4M3, blocks=blocks)


def test_e8m0_is_for_scales_and_takes_no_tensor():
    """It has neither sign nor zero."""
    with pytest.raises(ValueError, match="E8M0"):
        quantize(jnp.float32([1.0, -1.0, 0.0]), formats.E8M0)


# Blocks ##########################################################################################


BLOCKS = {
    "one": ((6, 8), (1, 1), formats.E4M3),
    "rows": ((6, 8), (6, 1), formats.FP16),
    "columns": ((6, 8), (1, 8), formats.E5M2),
    "128x128": ((256, 384), (2, 3), formats.E4M3),
    "1x128": ((16, 256), (16, 2), formats.E4M3),
    "layers": ((3, 4, 8), (3, 1, 1), formats.FP16),
    "vector": ((12,), (3,), formats.E5M2),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_scales_are_those_of_a_loop(name):
    shape, blocks, format = BLOCKS[name]
    # From block to block the magnitude grows.
    x = np.random.default_rng(0).normal(size=shape) * np.geomspace(1e-9, 1e9, np.prod(shape)).reshape(shape)
    x = x.astype(np.float32)

    @jax.jit
    def run(x):
        q = quantize(x, format, blocks=blocks, power_of_two=True)
        return q, amax(x, blocks), jnp.broadcast_to(expand(q.scale, shape), shape), q.dequantize()

    q, seen, spread, dequantized = jax.tree.map(np.asarray, run(x))
    assert q.scale.shape == blocks
    sizes = [dim // count for dim, count in zip(shape, blocks, strict=True)]
    for index in np.ndindex(blocks):
        at = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
        assert seen[index] == np.abs(x[at]).max()
        scale = msamp_scale(seen[index], format.max, 0)
        assert q.scale[index] == scale
        np.testing.assert_array_equal(bits(q.data[at]), bits(clipped_cast(x[at] / np.float32(scale), format)))
        np.testing.assert_array_equal(spread[at], scale)
    np.testing.assert_array_equal(dequantized, q.data.astype(np.float32) * spread)


def test_amax_of_a_tensor_a_scaled_array_and_nothing():
    x = jnp.array([[1.0, -7.0, 2.0], [0.0, 3.0, -4.0]], jnp.bfloat16)
    assert float(amax(x)) == 7 and amax(x).dtype == jnp.float32
    assert float(amax(ScaledArray(x, jnp.float32(2)))) == 14
    np.testing.assert_array_equal(amax(x, (2, 1)), [[7], [4]])
    np.testing.assert_array_equal(amax(jnp.zeros((0, 3)), (1, 3)), [[0, 0, 0]])
    assert float(amax(jnp.zeros((0, 3)))) == 0


@pytest.mark.parametrize("size", [4, 4096])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_amax_of_a_block_with_a_bad_number(size, bad):
    """Whatever the size: some compilers' maximum forgets NaN in large tensors."""
    x = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    expected = np.abs(x).max(axis=0)
    x[size // 2, 1] = bad

    @jax.jit
    def run(x):
        return amax(x), quantize(x, formats.E4M3, blocks=(1, 2), power_of_two=True), amax(x, (1, 2))

    whole, q, each = jax.tree.map(np.asarray, run(x))
    np.testing.assert_array_equal(whole, INF)
    np.testing.assert_array_equal(each, [[expected[0], INF]])
    np.testing.assert_array_equal(q.scale, [[msamp_scale(expected[0], 448, 0), 1.0]])
    np.testing.assert_array_equal(np.isnan(q.data.astype(np.float32)), np.isnan(x))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so_in_a_gradient(bad):
    q = quantize_gradient(jnp.array([1.0, bad, 0.5]))
    np.testing.assert_array_equal(q.dequantize(), [1, np.nan, 0.5])
