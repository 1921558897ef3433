"""Rounding of float32 to number formats: to nearest, stochastically, and the random bits of the latter.

    codes = cast(x, E4M3)                                  # to nearest even, saturating
    codes = cast_stochastically(x, E4M3, random_bits(seeds[0], x.shape))

A random bit depends on the key, the step, the leaf and the entry's place in the whole tensor (`leaf_seeds`).
So it is the same for any sharding, and a GPU computes it inside of the kernel that rounds. `jax.random.bits`
takes ten times as many operations, and needs the whole tensor on each device.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt, UInt8, UInt32

from fp8jax.formats import E2M1, E4M4, Format
from fp8jax.platforms import by_platform, with_auto_axes

_ODD = np.uint32(0x9E3779B9)  # 2**32 / golden ratio: consecutive numbers are spread far apart


def cast(x: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """Casts float32 `x` to `format`: to nearest even, saturating, NaN stays NaN; x's shape."""
    if format.bits == 8:
        # XLA's float8 conversion on CPU is scalar. Integer arithmetic on the float's bits vectorizes: the
        # same codes three times as fast.
        by_format = functools.partial(by_platform, cpu=cast_by_bits, default=_cast_natively, format=format)
        return with_auto_axes(by_format, lambda x: x, x)
    return _cast_natively(x, format)


def _cast_natively(x: jax.Array, format: Format) -> jax.Array:
    limit = jnp.float32(format.max)
    return lax.clamp(-limit, x, limit).astype(format.dtype)


def cast_by_bits(x: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """`cast` to an 8-bit format by integer arithmetic on the float's bits."""
    return lax.bitcast_convert_type(codes_by_bits(x, format).astype(jnp.uint8), format.dtype)


def codes_by_bits(x: Float[Array, "..."], format: Format) -> UInt[Array, "..."]:
    """`cast` to a format of at most 8 bits, as codes in uint32."""
    # Adding a power of two, the anchor, rounds the magnitude to a multiple of the format's step and leaves
    # the rounded mantissa in the low bits of the sum. The anchor follows the exponent of x. Subnormals have
    # one step, so they have one anchor.
    cut = 23 - format.mantissa_bits
    smallest = np.uint32((128 - format.exponent_bias) << 23)
    magnitude = lax.bitcast_convert_type(lax.min(lax.abs(x), jnp.float32(format.max)), jnp.uint32)
    anchor = (lax.max(magnitude, smallest) & np.uint32(0x7F800000)) + np.uint32(cut << 23)
    rounded = lax.bitcast_convert_type(magnitude, jnp.float32) + lax.bitcast_convert_type(anchor, jnp.float32)
    mantissa = lax.bitcast_convert_type(rounded, jnp.uint32) - anchor
    code = mantissa + (anchor >> np.uint32(cut)) - np.uint32((smallest + (cut << 23)) >> cut)
    # A NaN gives a large number here.
    sign_bit = format.bits - 1
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31 - sign_bit)) & np.uint32(1 << sign_bit)
    return lax.min(code, np.uint32(nan_code(format))) | sign


def nan_code(format: Format) -> int:
    """The code of NaN without its sign; the largest code of E2M1 and E4M4, which have no NaN."""
    if format in (E2M1, E4M4):
        return 7 if format == E2M1 else 255
    return int(abs(np.array(np.nan, format.dtype)).view(bits_of(format.dtype)))


def to_bytes(codes: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The bits of 8-bit codes, uint8. XLA on CPU slices and stacks float8 arrays by way of float16."""
    return lax.bitcast_convert_type(codes, jnp.uint8)


def from_bytes(codes: UInt8[Array, "..."], format: Format) -> Float[Array, "..."]:
    """The inverse of `to_bytes`, for codes of a format of 8 bits."""
    return lax.bitcast_convert_type(codes, format.dtype)


def to_bits(codes: Float[Array, "..."]) -> UInt[Array, "..."]:
    """The bits of an array as unsigned integers of the same width."""
    return lax.bitcast_convert_type(codes, bits_of(codes.dtype))


def bits_of(dtype: Any) -> Any:
    """The unsigned integer dtype of the same width."""
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(jnp.dtype(dtype).itemsize, jnp.uint32))


def select(mask: jax.Array, x: Any, otherwise: Any) -> jax.Array:
    """`jnp.where` of arrays of one shape and dtype, one of which may be a number.

    It makes a third of `jnp.where`'s operations, and each dot has several.
    """
    like = otherwise if isinstance(x, int | float) else x
    cases = (lax.full_like(like, case) if isinstance(case, int | float) else case for case in (x, otherwise))
    return lax.select(mask, *cases)


def cast_stochastically(
    x: Float32[Array, "..."], format: Format, random: UInt32[Array, "..."]
) -> Shaped[Array, "..."]:
    """Casts `x` to `format` by stochastic rounding: unbiased, saturating, NaN stays NaN; x's shape.

    A number between two codes becomes the upper one with the probability of its distance to the lower one.

    Args:
        x: any shape.
        format: a format of at most 16 bits.
        random: uniform random bits; the upper `23 - format.mantissa_bits` of each number are used.

    References:
        Deep Learning with Limited Numerical Precision, arXiv 1502.02551, section 3.
    """
    return lax.bitcast_convert_type(
        stochastic_codes(x, format, random).astype(bits_of(format.dtype)), format.dtype
    )


def stochastic_codes(
    x: Float32[Array, "..."], format: Format, random: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """`cast_stochastically`, as codes in uint32; to E4M4, too, for x that is not negative."""
    cut = np.uint32(23 - format.mantissa_bits)
    magnitude = lax.min(lax.abs(x), jnp.float32(format.max))
    # Takes a subnormal number of the format to the binade of the least normal number, which has its step.
    is_subnormal = magnitude < format.smallest_normal
    shifted = magnitude + select(is_subnormal, jnp.full_like(x, format.smallest_normal), 0.0)
    # A float's bits in order: adding random bits below the mantissa carries into it, and into the exponent.
    bits = (lax.bitcast_convert_type(shifted, jnp.uint32) + (random >> (32 - cut))) >> cut
    normal = np.uint32((127 - format.exponent_bias) << format.mantissa_bits)
    code = bits - normal - (is_subnormal.astype(jnp.uint32) << np.uint32(format.mantissa_bits))
    # A NaN gives a large number here.
    code = lax.min(code, jnp.full_like(code, nan_code(format)))
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31)) << np.uint32(format.bits - 1)
    return code | sign


def nearest(x: Float32[Array, "..."], format: Format) -> Float32[Array, "..."]:
    """The number of a 16-bit format that is nearest to x, ties to even, as float32; saturates; NaN stays.

    A compiler may omit a conversion to 16 bits and back, but not this.
    """
    magnitude = lax.min(lax.abs(x), jnp.float32(format.max))
    bits, cut = lax.bitcast_convert_type(magnitude, jnp.uint32), np.uint32(23 - format.mantissa_bits)
    last = (bits >> cut) & np.uint32(1)
    bits = ((bits + np.uint32((1 << (cut - 1)) - 1) + last) >> cut) << cut
    anchor = _anchor(magnitude, format)
    subnormal = (magnitude + anchor) - anchor
    is_subnormal = magnitude < format.smallest_normal
    rounded = lax.select(is_subnormal, subnormal, lax.bitcast_convert_type(bits, jnp.float32))
    return lax.select(x < 0, -rounded, rounded)


def remainder_of(x: Float32[Array, "..."], format: Format) -> Float32[Array, "..."]:
    """x minus `cast(x, format)`, float32 and exact; at most half a step of the format unless x saturates."""
    # The code itself is no help: a compiler may omit its conversion to float16 and back.
    rounded = rounded_magnitude(x, format)
    return x - lax.select(x < 0, -rounded, rounded)


def rounded_magnitude(x: Float32[Array, "..."], format: Format) -> Float32[Array, "..."]:
    """The magnitude of `cast(x, format)` as float32, without a cast; not of NaN."""
    magnitude = lax.min(lax.abs(x), jnp.float32(format.max))
    anchor = _anchor(magnitude, format)
    return (magnitude + anchor) - anchor


def _anchor(magnitude: jax.Array, format: Format) -> jax.Array:
    """A power of two with the format's step as its last bit: it rounds what is added to it. A compiler would
    omit the sum and the difference of a constant."""
    binade = lax.max(magnitude, jnp.float32(format.smallest_normal))
    bits = lax.bitcast_convert_type(binade, jnp.uint32) & np.uint32(0x7F800000)
    return lax.bitcast_convert_type(bits + np.uint32((23 - format.mantissa_bits) << 23), jnp.float32)


def leaf_seeds(key: UInt32[Array, "2"], count: Int32[Array, ""], leaves: int) -> UInt32[Array, "leaves"]:
    """A seed for each leaf of one step, from the raw data of a key and the number of steps."""
    step = _mix(_mix(key[0] ^ count.astype(jnp.uint32)) ^ key[1])
    return _mix(step + lax.iota(jnp.uint32, leaves) * _ODD)


def random_bits(
    seed: UInt32[Array, ""], shape: tuple[int, ...], shard: tuple[int, jax.Array, int] | None = None
) -> UInt32[Array, "..."]:
    """32 uniform random bits for each entry of an array.

    Args:
        seed: the leaf's.
        shape: of the array, or of this device's shard.
        shard: (axis, index, count) of this device's shard of the array along an axis; None for the array.
    """
    # A flat count: XLA would store the counts of rows and columns, which all tensors share, and then fuse the
    # outputs of different tensors.
    place = lax.iota(jnp.uint32, math.prod(shape))
    if shard is not None:
        axis, index, count = shard
        size = np.uint32(math.prod(shape[axis:]))  # of this shard in one row of the axes before
        outer = place // size
        place = place + outer * (size * np.uint32(count - 1)) + index.astype(jnp.uint32) * size
    return bits_at(place.reshape(shape), seed)


def bits_at(place: UInt32[Array, "..."], seed: UInt32[Array, ""]) -> UInt32[Array, "..."]:
    """The bits of the entries at these flat places of the whole array."""
    return _mix(place ^ seed)


def other_bits(bits: UInt32[Array, "..."]) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Two more random numbers for an entry: with other upper bits than `bits`."""
    return (bits << np.uint32(16)) | (bits >> np.uint32(16)), bits * _ODD


def _mix(x: jax.Array) -> jax.Array:
    """Mixes 32 bits: Chris Wellons' hash "lowbias32", a permutation with 0.17 bits of bias."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
