"""How a tensor becomes codes and a scale, and the amaxes that scales come from."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fp8jax.formats import E4M3, E8M0, Format, parse
from fp8jax.platforms import by_platform, with_auto_axes
from fp8jax.quantization.array import ScaledArray, expand, format_of, is_scaled, value
from fp8jax.quantization.casts import cast, select
from fp8jax.quantization.scales import largest_scale, scale_of

_INFINITY = np.array(np.inf, np.float32).view(np.int32)


def quantize(
    x: Any,
    format: Format | str,
    scale: Any = None,
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
        scale: float32, scalar or of x's rank (see `ScaledArray`). By default the one that
            maps the largest magnitude of `x` (of each block) to the format's max: current
            scaling; and at most the one whose largest value is finite.
        margin: binary headroom of the default scale.
        power_of_two: whether the default scale is a power of two.
        blocks: shape of the default scale; () is one for the whole tensor.

    Returns:
        A `ScaledArray` of x's shape. Half an ulp at the format's max, times the scale,
        bounds the error of every element that does not saturate.

    Raises:
        TypeError: `x` is not a floating array, `format` no format, or `blocks` no shape.
        ValueError: the scale's or blocks' shape does not fit, or the format is E8M0, which has
            neither sign nor zero, or is not known.
    """
    format = parse(format)
    x = jnp.asarray(value(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x`: expected a floating array to quantize; got {x.dtype}.")
    if not isinstance(blocks, tuple | list):
        raise TypeError(f"`blocks`: expected a shape; got {blocks!r}.")
    if format == E8M0:
        raise ValueError("`format`: expected a format of tensors; got E8M0, which is one of scales.")
    if scale is None:
        ScaledArray(x, jax.ShapeDtypeStruct(blocks, jnp.float32)).validate()
        scale = scale_of(amax(x, blocks), format.max, margin=margin, power_of_two=power_of_two)
        scale = jnp.minimum(scale, largest_scale(format.max, power_of_two=power_of_two))
    scale = jnp.asarray(scale, jnp.float32)
    ScaledArray(x, scale).validate()
    return ScaledArray(cast(x.astype(jnp.float32) * expand(1 / scale, x.shape), format), scale)


def quantize_like(x: Any, like: Any) -> Any:
    """The value of `x`, quantized where `like` is a `ScaledArray`: to its format and its own dtype, on fresh
    power-of-two scales of its blocks."""
    if not is_scaled(like):
        return value(x)
    q = quantize(x, format_of(like), power_of_two=True, blocks=like.bits.shape)
    return q.with_own_dtype(like.own_dtype)


def quantize_gradient(x: Any, blocks: tuple[int, ...] = ()) -> ScaledArray:
    """A weight gradient in E4M3 on power-of-two scales of its own.

    What is infinite becomes NaN, not the format's max: an optimizer must see a broken step.
    """
    x = without_infinities(jnp.asarray(value(x), jnp.float32))
    return quantize(x, E4M3, power_of_two=True, blocks=blocks)


def without_infinities(x: jax.Array) -> jax.Array:
    """`x` with NaN for what is infinite: saturated, it would look like a large number."""
    # Behind `by_platform`, or JAX would keep the constant, in x's shape, through a scan's backward.
    way = functools.partial(by_platform, cpu=_without_infinities, default=_without_infinities)
    return with_auto_axes(way, lambda x: x, x)


def _without_infinities(x: jax.Array) -> jax.Array:
    return select(lax.is_finite(x), x, float("nan"))


def amax(x: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """Largest absolute value of each block of `x`, float32 of shape `shape`.

    Args:
        x: float array or `ScaledArray`.
        shape: () for the whole tensor, or `x`'s rank with dims that divide its dims.

    Returns:
        float32 of shape `shape`; 0 for an empty tensor; inf where a block has inf or NaN.
    """
    ways = functools.partial(by_platform, cpu=_amax_of_floats, default=_amax_of_bits, shape=shape)
    # Split into blocks, a sharded dim has no sharding that JAX could name: the few amaxes go everywhere.
    out = PartitionSpec() if shape else _amax_of_floats
    return with_auto_axes(ways, out, value(x))


def _amax_of_floats(x: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    magnitude = lax.abs(x.astype(jnp.float32))
    # XLA's maximum on CPU may pass over a NaN.
    magnitude = select(magnitude == magnitude, magnitude, float("inf"))
    magnitude, axes = _in_blocks(magnitude, shape)
    # `jnp.max(..., initial=0)` takes the maximum with 0 in a kernel of its own.
    return lax.reduce(magnitude, jnp.float32(0), lax.max, axes)


def _amax_of_bits(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return amax_from_bits(amax_bits(x, shape))


def amax_bits(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`amax` of a float array as int32 bits, which have the order of the magnitudes, and NaN beyond infinity.

    The bits of several reductions can be reduced further before `amax_from_bits`: a GPU runs what stands
    between a reduction and a concatenation as a kernel of its own.
    """
    bits = lax.bitcast_convert_type(lax.abs(x.astype(jnp.float32)), jnp.int32)
    bits, axes = _in_blocks(bits, shape)
    return lax.reduce(bits, np.int32(0), lax.max, axes)


def amax_from_bits(bits: jax.Array) -> jax.Array:
    """The amaxes of these `amax_bits`."""
    return lax.bitcast_convert_type(lax.min(bits, jnp.full_like(bits, _INFINITY)), jnp.float32)


def _in_blocks(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """`x` with each dim split into (blocks, within a block), and the second of each pair; or all of it."""
    if not shape:
        return x, tuple(range(x.ndim))
    pairs = [n for d, b in zip(x.shape, shape, strict=True) for n in (b, d // b if b else 1)]
    return x.reshape(pairs), tuple(range(1, 2 * x.ndim, 2))
