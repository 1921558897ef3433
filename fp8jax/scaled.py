"""A tensor kept in few bits: codes and a scale, `value = data * scale`.

    >>> import jax.numpy as jnp
    >>> from fp8jax import formats, quantize
    >>> q = quantize(jnp.array([0.1, -2.0, 300.0]), formats.E4M3)
    >>> q.data.dtype, q.scale.shape
    (dtype(float8_e4m3fn), ())
    >>> [round(float(v), 3) for v in q.dequantize()]
    [0.105, -2.009, 300.0]

This is the only module that casts to a narrow format, so the only one that saturates:

* rounding: to nearest, ties to even; subnormals are kept;
* overflow: beyond the format's max, infinities included, becomes +-max (as the
  hardware's saturating conversion does), never NaN;
* NaN stays NaN, so that a broken step shows;
* zero stays zero, with its sign.

A scale is always finite, positive and a normal float32 with a normal reciprocal: an
amax that is zero, subnormal, infinite or NaN says nothing and gives scale 1.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.formats import ALL, E4M3, E8M0, Format
from fp8jax.platforms import by_platform, with_auto_axes

# Scales stay in [2**-126, 2**126]: the scale and its reciprocal are then both normal
# float32 numbers, which compilers that flush subnormals to zero keep.
MIN_SCALE = 2.0**-126
_INFINITY = np.array(np.inf, np.float32).view(np.int32)
MAX_SCALE = 2.0**126


@functools.partial(jax.tree_util.register_dataclass, data_fields=("data", "scale"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray:
    """Codes and the scale that gives them their meaning: `value = data * scale`.

    Invariants (checked by `validate`):
        `data` holds codes of a floating dtype, any shape;
        `scale` is float32, a scalar or of `data`'s rank, each of its dims dividing
        `data`'s: one entry scales a whole block.

    Arithmetic with it (+ - * / ** negation) acts on the dequantized value and returns a
    plain float32 array.
    """

    data: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Rank of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of the scales."""
        return int(self.data.nbytes + self.scale.nbytes)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The value, `data * scale`, computed in float32 and cast to `dtype`."""
        return (self.data.astype(jnp.float32) * expand(self.scale, self.shape)).astype(dtype)

    def validate(self) -> "ScaledArray":
        """Returns itself; raises ValueError naming both shapes if an invariant is broken."""
        shape, blocks = self.shape, tuple(self.scale.shape)
        fits = not blocks or (
            len(blocks) == len(shape) and all(b and d % b == 0 for d, b in zip(shape, blocks, strict=True))
        )
        is_float = jnp.issubdtype(self.data.dtype, jnp.floating) and self.scale.dtype == jnp.float32
        if not (fits and is_float):
            raise ValueError(
                "`ScaledArray`: expected floating data and a float32 scale, scalar or of the data's rank "
                f"with dims that divide the data's; got data {self.data.dtype}{list(shape)}, "
                f"scale {self.scale.dtype}{list(blocks)}."
            )
        return self

    # NumPy would take it for an object and call the operators below element by element.
    __array_ufunc__ = None

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __getitem__(self, index: Any) -> Any:
        """Itself for `...`, else a part of the dequantized value."""
        return self if index is ... else self.dequantize()[index]

    def __add__(self, other: Any) -> jax.Array:
        return self.dequantize() + value(other)

    def __radd__(self, other: Any) -> jax.Array:
        return value(other) + self.dequantize()

    def __sub__(self, other: Any) -> jax.Array:
        return self.dequantize() - value(other)

    def __rsub__(self, other: Any) -> jax.Array:
        return value(other) - self.dequantize()

    def __mul__(self, other: Any) -> jax.Array:
        return self.dequantize() * value(other)

    def __rmul__(self, other: Any) -> jax.Array:
        return value(other) * self.dequantize()

    def __truediv__(self, other: Any) -> jax.Array:
        return self.dequantize() / value(other)

    def __rtruediv__(self, other: Any) -> jax.Array:
        return value(other) / self.dequantize()

    def __pow__(self, other: Any) -> jax.Array:
        return self.dequantize() ** value(other)

    def __neg__(self) -> jax.Array:
        return -self.dequantize()


def is_scaled(leaf: Any) -> bool:
    """Whether `leaf` is a `ScaledArray`: the `is_leaf` of tree functions."""
    return isinstance(leaf, ScaledArray)


def format_of(x: Any) -> Format:
    """The format of an array, or of a `ScaledArray`'s codes."""
    dtype = x.data.dtype if is_scaled(x) else x.dtype
    return next(format for format in ALL if format.dtype == dtype)


def value(x: Any) -> Any:
    """`x` dequantized if it is a `ScaledArray`, else `x` itself."""
    return x.dequantize() if isinstance(x, ScaledArray) else x


def expand(scale: Any, shape: tuple[int, ...]) -> jax.Array:
    """`scale` with one entry per block, made to broadcast against `shape`."""
    scale = jnp.asarray(scale)
    if scale.ndim:
        for axis, (blocks, dim) in enumerate(zip(scale.shape, shape, strict=True)):
            if blocks not in (1, dim):
                scale = jnp.repeat(scale, dim // blocks, axis)
        return scale
    return scale.reshape((1,) * len(shape))


def amax(x: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """Largest absolute value of each block of `x`, float32 of shape `shape`.

    Args:
        x: float array or `ScaledArray`.
        shape: () for the whole tensor, or `x`'s rank with dims that divide its dims.

    Returns:
        float32 of shape `shape`; 0 for an empty tensor; inf where a block has inf or NaN.
    """
    return by_platform(value(x), cpu=_amax_of_floats, default=_amax_of_bits, shape=shape)


def _amax_of_floats(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    magnitude = lax.abs(x.astype(jnp.float32))
    # XLA's maximum on CPU may pass over a NaN.
    magnitude = select(magnitude == magnitude, magnitude, float("inf"))
    magnitude, axes = _in_blocks(magnitude, shape)
    # `jnp.max(..., initial=0)` takes the maximum with 0 in a kernel of its own.
    return lax.reduce(magnitude, jnp.float32(0), lax.max, axes)


def _amax_of_bits(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """As integers, which have the order of the magnitudes, and NaN beyond infinity."""
    bits = lax.bitcast_convert_type(lax.abs(x.astype(jnp.float32)), jnp.int32)
    bits, axes = _in_blocks(bits, shape)
    largest = lax.reduce(bits, np.int32(0), lax.max, axes)
    return lax.bitcast_convert_type(lax.min(largest, jnp.full_like(largest, _INFINITY)), jnp.float32)


def _in_blocks(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """`x` with each dim split into (blocks, within a block), and the second of each pair; or all of it."""
    if not shape:
        return x, tuple(range(x.ndim))
    pairs = [n for d, b in zip(x.shape, shape, strict=True) for n in (b, d // b)]
    return x.reshape(pairs), tuple(range(1, 2 * x.ndim, 2))


def select(mask: jax.Array, x: Any, otherwise: Any) -> jax.Array:
    """`jnp.where` of arrays of one shape and dtype, one of which may be a number: a third of the operations,
    which add up where each product of a model has a few."""
    like = otherwise if isinstance(x, int | float) else x
    cases = (lax.full_like(like, case) if isinstance(case, int | float) else case for case in (x, otherwise))
    return lax.select(mask, *cases)


def usable(amax: jax.Array) -> jax.Array:
    """Where an amax says something: positive, finite and not subnormal."""
    tiny = jnp.float32(np.finfo(np.float32).tiny)
    return (amax >= tiny) & (amax <= jnp.float32(np.finfo(np.float32).max))


def scale_of(
    amax: jax.Array,
    limit: Any,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    otherwise: Any = 1.0,
) -> jax.Array:
    """The scale that maps `amax` to `limit`, the top of a format.

    Mathematically equivalent to `amax / limit * 2**margin`; as a power of two to
    `2**-(floor(log2(limit / amax)) - margin)`, exactly (no `log2` is taken).

    Args:
        amax: float32, any shape.
        limit: the format's max; a number or an array that broadcasts.
        margin: binary headroom left above amax.
        power_of_two: round the scale up to a power of two (MS-AMP's scales).
        otherwise: the scale where amax is 0, subnormal, infinite or NaN.

    Returns:
        float32 of amax's shape, within [2**-126, 2**126].

    References:
        TransformerEngine `DelayedScaling` and `Float8CurrentScaling` (the reciprocal of
        their factor), MS-AMP `ScalingMeta` (power of two).
    """
    amax = jnp.broadcast_to(amax, np.broadcast_shapes(amax.shape, np.shape(limit)))
    if not isinstance(otherwise, int | float):
        otherwise = jnp.broadcast_to(jnp.asarray(otherwise, jnp.float32), amax.shape)
    known = usable(amax)
    factor = factor_of(amax, limit, margin=margin, power_of_two=power_of_two)
    # Exactly `where(known, 1 / factor, otherwise)`. XLA computes what ends in a division once, and what ends
    # in a choice again for each of its uses.
    return select(known, jnp.ones_like(amax), otherwise) / select(known, factor, 1.0)


def factor_of(amax: jax.Array, limit: Any, *, margin: int = 0, power_of_two: bool = False) -> jax.Array:
    """The reciprocal of `scale_of` where the amax is usable, else any number."""
    if power_of_two:
        bits, of_limit = (lax.bitcast_convert_type(jnp.float32(x), jnp.int32) for x in (amax, limit))
        # Exponents and fractions are subtracted at once: a borrow from the exponents is the floor.
        exponent = lax.clamp(np.int32(-126), ((of_limit - bits) >> 23) - margin, np.int32(126))
        return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    factor = limit * np.float32(2.0**-margin) / amax
    return lax.clamp(np.float32(MIN_SCALE), factor, np.float32(MAX_SCALE))


def quantize(
    x: Any,
    format: Format,
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
        format: format of the codes.
        scale: float32, scalar or of x's rank (see `ScaledArray`). By default the one that
            maps the largest magnitude of `x` (of each block) to the format's max: current
            scaling.
        margin: binary headroom of the default scale.
        power_of_two: whether the default scale is a power of two.
        blocks: shape of the default scale; () is one for the whole tensor.

    Returns:
        A `ScaledArray` of x's shape. Half an ulp at the format's max, times the scale,
        bounds the error of every element that does not saturate.

    Raises:
        TypeError: `x` is not a floating array.
        ValueError: the scale's or blocks' shape does not fit, or the format is E8M0, which has
            neither sign nor zero.
    """
    x = jnp.asarray(value(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x`: expected a floating array to quantize; got {x.dtype}.")
    if format == E8M0:
        raise ValueError("`format`: expected a format of tensors; got E8M0, which is one of scales.")
    if scale is None:
        ScaledArray(x, jax.ShapeDtypeStruct(blocks, jnp.float32)).validate()
        scale = scale_of(amax(x, blocks), format.max, margin=margin, power_of_two=power_of_two)
    scale = jnp.asarray(scale, jnp.float32)
    ScaledArray(x, scale).validate()
    return ScaledArray(cast(x.astype(jnp.float32) * expand(1 / scale, x.shape), format), scale)


def quantize_gradient(x: Any, blocks: tuple[int, ...] = ()) -> ScaledArray:
    """A weight gradient in E4M3 on power-of-two scales of its own.

    What is infinite becomes NaN, not the format's max: an optimizer must see a broken step.
    """
    x = without_infinities(jnp.asarray(value(x), jnp.float32))
    return quantize(x, E4M3, power_of_two=True, blocks=blocks)


def without_infinities(x: jax.Array) -> jax.Array:
    """`x` with NaN for what is infinite: saturated, it would look like a large number."""
    return by_platform(x, cpu=_without_infinities, default=_without_infinities)


def _without_infinities(x: jax.Array) -> jax.Array:
    # Behind `by_platform`, or JAX would keep the constant, in x's shape, through a scan's backward.
    return select(lax.is_finite(x), x, float("nan"))


def to_bytes(codes: jax.Array) -> jax.Array:
    """8-bit codes as uint8. XLA on CPU slices, stacks and moves float8 arrays by way of float16."""
    return lax.bitcast_convert_type(codes, jnp.uint8)


def to_bits(codes: jax.Array) -> jax.Array:
    """Codes as unsigned integers of their width."""
    return lax.bitcast_convert_type(codes, bits_of(codes.dtype))


def bits_of(dtype: Any) -> Any:
    """The unsigned integers of a dtype's width."""
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(jnp.dtype(dtype).itemsize, jnp.uint32))


def cast(x: jax.Array, format: Format) -> jax.Array:
    """float32 `x` to the codes of `format`: to nearest even, saturating, NaN kept."""
    if format.bits == 8:
        # XLA's own float8 conversion on CPU is scalar; integer arithmetic on the float's
        # bits vectorizes and gives the same codes three times as fast.
        by_format = functools.partial(by_platform, cpu=_cast_by_bits, default=_cast_natively, format=format)
        return with_auto_axes(by_format, lambda x: x, x)
    return _cast_natively(x, format)


def _cast_natively(x: jax.Array, format: Format) -> jax.Array:
    limit = jnp.float32(format.max)
    return lax.clamp(-limit, x, limit).astype(format.dtype)


def _cast_by_bits(x: jax.Array, format: Format) -> jax.Array:
    # Adding a power of two to the magnitude makes the float adder itself round to the format's step there,
    # and leaves the rounded mantissa in the low bits of the sum. The power follows the exponent, down to
    # that of the format's subnormals, which all have the same step.
    cut = 23 - format.mantissa_bits
    smallest = np.uint32((128 - format.exponent_bias) << 23)
    magnitude = lax.bitcast_convert_type(lax.min(lax.abs(x), jnp.float32(format.max)), jnp.uint32)
    anchor = (lax.max(magnitude, smallest) & np.uint32(0x7F800000)) + np.uint32(cut << 23)
    rounded = lax.bitcast_convert_type(magnitude, jnp.float32) + lax.bitcast_convert_type(anchor, jnp.float32)
    mantissa = lax.bitcast_convert_type(rounded, jnp.uint32) - anchor
    code = mantissa + (anchor >> np.uint32(cut)) - np.uint32((smallest + (cut << 23)) >> cut)
    # Of a NaN all this is a large number, and no other code is larger than NaN's.
    nan = np.uint32(np.array(np.nan, format.dtype).view(np.uint8) & 0x7F)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(24)) & np.uint32(0x80)
    code = lax.min(code, nan) | sign
    return lax.bitcast_convert_type(code.astype(jnp.uint8), format.dtype)
