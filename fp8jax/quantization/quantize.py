"""Quantization, and the amaxes that scales are computed from."""

import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from fp8jax.formats import E2M1, E4M3, E4M4, E8M0, Format, get
from fp8jax.platforms import by_platform, with_auto_axes
from fp8jax.quantization.array import ScaledArray, expand, value
from fp8jax.quantization.rounding import cast, select
from fp8jax.quantization.scales import MAX_SCALE, MIN_SCALE, largest_scale, scale_of

_INFINITY = np.array(np.inf, np.float32).view(np.int32)


def quantize(
    x: Float[Array, "..."] | ScaledArray,
    format: Format | str,
    scale: Float[Array, "..."] | float | None = None,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    blocks: tuple[int, ...] = (),
) -> ScaledArray:
    """Casts `x / scale` to `format`, rounding to nearest even and saturating.

    Mathematically equivalent to
    `clip(x.astype(float32) * (1 / scale), -format.max, format.max).astype(format.dtype)`.

    Args:
        x: float array (float32, bfloat16, float16) or `ScaledArray`, any shape.
        format: format of the codes, or its name.
        scale: float32, scalar or of x's rank (see `ScaledArray`), from 2**-126 to 2**126. A scale
            outside of this range raises; under `jax.jit` it becomes NaN, and so do all values. The default is
            current scaling: it maps the amax of `x`, or of each block, to the format's max, but no code to
            infinity.
        margin: binary headroom of the default scale.
        power_of_two: whether the default scale is a power of two.
        blocks: the number of blocks along each axis, the shape of the default scale; () for one scale.

    Returns:
        A `ScaledArray` of x's shape. The error of an element that does not saturate is at most half an ulp
        at the format's max, times the scale. NaN stays NaN: E2M1 has no NaN, so the scale of the block
        becomes NaN.

    Raises:
        TypeError: `x` is not a floating array, `format` not a format, or `blocks` not a shape.
        ValueError: the shape of `scale` or `blocks` does not fit, a scale is zero, negative, NaN, infinite or
            subnormal, `format` is unknown, or it has no sign: E8M0 and E4M4.
    """
    format = get(format)
    x = jnp.asarray(value(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x`: expected a floating array to quantize; got {x.dtype}.")
    if not isinstance(blocks, tuple | list) or not all(hasattr(n, "__index__") and n >= 0 for n in blocks):
        raise TypeError(f"`blocks`: expected a shape; got {blocks!r}.")
    blocks = tuple(blocks)
    if format in (E8M0, E4M4):
        of_what = {"E8M0": "scales", "E4M4": "second moments"}[format.name]
        raise ValueError(
            f"`format`: expected a format with a sign; got {format.name}, which is for {of_what}."
        )
    if scale is None:
        ScaledArray(x, jax.ShapeDtypeStruct(blocks, jnp.float32)).validate()
        scale = scale_of(amax(x, blocks), format.max, margin=margin, power_of_two=power_of_two)
        scale = jnp.minimum(scale, largest_scale(format.max, power_of_two=power_of_two))
    else:
        scale = _checked(jnp.asarray(scale, jnp.float32))
    return quantize_by(x, format, scale)


def quantize_by(
    x: Float[Array, "..."] | ScaledArray, format: Format, scale: Float32[Array, "..."] | float
) -> ScaledArray:
    """`quantize` on a scale that is known to be finite, positive and normal."""
    x, scale = jnp.asarray(value(x)), jnp.asarray(scale, jnp.float32)
    ScaledArray(x, scale).validate()
    codes = cast(x.astype(jnp.float32) * expand(1 / scale, x.shape), format)
    if format == E2M1:  # no code is NaN
        has_nan = amax(jnp.isnan(x).astype(jnp.float32), scale.shape) > 0
        scale = select(has_nan, float("nan"), scale)
    return ScaledArray(codes, scale)


def _checked(scale: jax.Array) -> jax.Array:
    """The scale; NaN where it is not legal, if its value is not known yet."""
    is_legal = (scale >= MIN_SCALE) & (scale <= MAX_SCALE)
    if isinstance(scale, jax.core.Tracer):
        return select(is_legal, scale, float("nan"))
    if not is_legal.all():
        bad = np.asarray(scale)[~np.asarray(is_legal)].flat[0]
        raise ValueError(f"`scale`: expected finite, positive, normal numbers, up to 2**126; got {bad:g}.")
    return scale


def quantize_gradient(x: Float[Array, "..."] | ScaledArray, blocks: tuple[int, ...] = ()) -> ScaledArray:
    """A weight gradient quantized to E4M3 on new power-of-two scales.

    Infinities become NaN and do not saturate, so that the optimizer sees a broken step.
    """
    x = without_infinities(jnp.asarray(value(x), jnp.float32))
    return quantize(x, E4M3, power_of_two=True, blocks=blocks)


def without_infinities(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` with NaN in place of infinities, which a cast would saturate."""
    # By `by_platform`, because JAX would save the constant, in x's shape, for a scan's backward.
    way = functools.partial(by_platform, cpu=_without_infinities, default=_without_infinities)
    return with_auto_axes(way, lambda x: x, x)


def _without_infinities(x: jax.Array) -> jax.Array:
    return select(lax.is_finite(x), x, float("nan"))


def amax(x: Float[Array, "..."] | ScaledArray, shape: tuple[int, ...] = ()) -> Float32[Array, "..."]:
    """Largest absolute value of each block of `x`, float32 of shape `shape`.

    Args:
        x: float array or `ScaledArray`.
        shape: () for the whole tensor, or `x`'s rank with dims that divide its dims.

    Returns:
        float32 of shape `shape`; 0 for an empty tensor; inf where a block has inf or NaN.
    """
    ways = functools.partial(by_platform, cpu=amax_of_floats, default=_amax_of_bits, shape=shape)
    # A sharded dim that is split into blocks has no sharding that JAX can name: replicate the few amaxes.
    return with_auto_axes(ways, PartitionSpec() if shape else amax_of_floats, value(x))


def amax_of_floats(x: Float[Array, "..."], shape: tuple[int, ...] = ()) -> Float32[Array, "..."]:
    """`amax` of a float array by a maximum of floats, for reductions that are reduced further."""
    magnitude = lax.abs(x.astype(jnp.float32))
    # XLA's maximum on CPU may ignore a NaN.
    magnitude = select(magnitude == magnitude, magnitude, float("inf"))
    magnitude, axes = _in_blocks(magnitude, shape)
    # `jnp.max(..., initial=0)` takes the maximum with 0 in a separate kernel.
    return lax.reduce(magnitude, jnp.float32(0), lax.max, axes)


def _amax_of_bits(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # Bits have the order of the magnitudes, and NaN is beyond infinity. On a GPU a maximum of floats reads a
    # tensor again that a cast reads, too: a layer's kernels then move 17% more bytes.
    bits = lax.bitcast_convert_type(lax.abs(x.astype(jnp.float32)), jnp.int32)
    bits, axes = _in_blocks(bits, shape)
    return amax_from_bits(lax.reduce(bits, np.int32(0), lax.max, axes))


def amax_from_bits(bits: Int32[Array, "..."]) -> Float32[Array, "..."]:
    """An amax from the bits of the largest magnitude; infinite for a NaN."""
    return lax.bitcast_convert_type(lax.min(bits, jnp.full_like(bits, _INFINITY)), jnp.float32)


def _in_blocks(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """`x` with each dim split into (blocks, entries of a block), and the axes to reduce."""
    if not shape:
        return x, tuple(range(x.ndim))
    pairs = [n for d, b in zip(x.shape, shape, strict=True) for n in (b, d // b if b else 1)]
    return x.reshape(pairs), tuple(range(1, 2 * x.ndim, 2))
