"""Storage formats of optimizer states, and their encoding and decoding.

| storage | bytes per entry | scale |
|---|---|---|
| float32 array | 4 | none |
| `ScaledArray` of E4M3 or FP16 | 1 or 2 | a power of two for each scale block of the parameter |
| `Root` | 2 | the same |
| `Blockwise` | 1.016 | the absmax of each 256 entries |
| E4M3 remainder of a `ScaledArray` | 1 | `REMAINDER_STEP` times the weight's |
| int8 remainder of a bfloat16 or float16 array | 1 | none; in 256ths of each weight's last bit |
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax import formats
from fp8jax.optim.step.blockwise import Blockwise, block_absmax
from fp8jax.quantization import (
    ScaledArray,
    cast,
    cast_stochastically,
    expand,
    format_of,
    is_scaled,
    nearest,
    remainder_of,
    to_bits,
    value,
)

# The smallest array with blockwise moments, as in bitsandbytes (`min_8bit_size`).
FEWEST = 4096

# Half an ulp of the largest FP16 number, 16, is then 256 in E4M3, the largest power of two it has.
REMAINDER_STEP = 1 / 16


@functools.partial(jax.tree_util.register_dataclass, data_fields=("root",), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """A second moment stored as its root: the value is `root * root`. `jnp.asarray` gives the value.

    FP16's 40 binades are then 80 of the value.
    """

    root: Any  # a `ScaledArray`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.root.shape)

    def dequantize(self) -> jax.Array:
        """The value, float32."""
        return jnp.square(value(self.root))

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()


def zeros(param: Any, format: formats.Format) -> Any:
    """Zeros in a format, with the shape, scale blocks and sharding of a parameter."""
    data = jnp.zeros_like(param.data if is_scaled(param) else param, format.dtype)
    if format == formats.FP32:
        return data
    return ScaledArray(data, jnp.ones(param.scale.shape if is_scaled(param) else (), jnp.float32))


def blockwise_zeros(param: Any, *, signed: bool) -> Any:
    """`Blockwise` zeros; float32 zeros for an array with fewer than `FEWEST` entries."""
    like = param.data if is_scaled(param) else param
    return jnp.zeros_like(like, jnp.float32) if like.size < FEWEST else Blockwise.zeros(like, signed)


def decode(stored: Any, remainder: Any = None) -> jax.Array:
    """The dequantized value, float32; of a weight with its remainder."""
    if isinstance(stored, Blockwise | Root):
        return stored.dequantize()
    if remainder is None:
        return value(stored).astype(jnp.float32)
    if not is_scaled(stored):
        weight = stored.astype(jnp.float32)
        return weight + remainder.astype(jnp.float32) * _fraction(weight, format_of(stored))
    codes = stored.data.astype(jnp.float32) + REMAINDER_STEP * remainder.astype(jnp.float32)
    return codes * expand(stored.scale, stored.shape)


def block_maxima(x: jax.Array, stored: Any) -> Any:
    """The absmax of each block of `x` if `stored` is a `Blockwise`, else None."""
    return block_absmax(x) if isinstance(stored, Blockwise) else None


def scaled_part(stored: Any) -> Any:
    """The `ScaledArray` of a storage; None if it has none."""
    stored = stored.root if isinstance(stored, Root) else stored
    return stored if is_scaled(stored) else None


def before_rounding(x: jax.Array, stored: Any) -> jax.Array:
    """The value that rounding sees when `x` is stored as `stored`: its root, or itself."""
    return jnp.sqrt(x) if isinstance(stored, Root) else x


def encode(x: jax.Array, stored: Any, scale: Any, random: Any = None) -> Any:
    """`x` in the format of `stored`.

    Args:
        x: the new value, float32.
        stored: the old value, in its storage format.
        scale: the new scale of a `ScaledArray` or `Root`, or the `block_maxima` of a `Blockwise`.
        random: bits for stochastic rounding of a `ScaledArray` or `Root`; None rounds to nearest.
    """
    if isinstance(stored, Blockwise):
        return Blockwise.of(x, stored.signed, scale)
    if isinstance(stored, Root):
        return Root(encode(before_rounding(x, stored), stored.root, scale, random))
    if not is_scaled(stored):
        return x
    codes, format = x * expand(1 / scale, x.shape), format_of(stored)
    data = cast(codes, format) if random is None else cast_stochastically(codes, format, random)
    return ScaledArray(data, scale)


def encode_weight(
    x: jax.Array,
    stored: Any,
    scale: Any,
    remainder: Any,
    *,
    rounding: str,
    random: Any = None,
    again: Any = None,
) -> tuple[Any, Any]:
    """A new weight in the format of `stored`, and its new remainder; None without a remainder.

    Args:
        x: the new weight, float32.
        stored: the old weight or master weight.
        scale: the new scale of a `ScaledArray`.
        remainder: the old remainder.
        rounding: the recipe's rounding of weights; "kahan" needs the remainder.
        random: bits for stochastic rounding, of the weight or of its remainder.
        again: the new weight, computed again for the remainder; by default `x`.
    """
    if remainder is None:
        return encode(x, stored, scale, random if rounding == "stochastic" else None), None
    return encode(x, stored, scale), encode_remainder(x if again is None else again, stored, scale, random)


def encode_remainder(x: jax.Array, stored: Any, scale: Any, random: jax.Array) -> jax.Array:
    """The error of `encode` to nearest, as E4M3 codes that are rounded stochastically."""
    remainder = remainder_of(x * expand(1 / scale, x.shape), format_of(stored))
    return cast_stochastically(remainder / REMAINDER_STEP, formats.E4M3, random)


def is_rounded(param: Any, rounding: str) -> bool:
    """Whether the step itself rounds a parameter that is no `ScaledArray`: a bfloat16 or float16 array that a
    recipe does not round to nearest. Other arrays get an update to add."""
    if param is None or is_scaled(param) or rounding == "nearest":
        return False
    return param.dtype in (formats.BF16.dtype, formats.FP16.dtype)


def encode_plain(x: jax.Array, stored: Any, *, rounding: str, random: jax.Array) -> tuple[jax.Array, Any]:
    """The float32 update of a bfloat16 or float16 weight, and its new remainder; None without a remainder.

    `stored + update`, in float32 and then rounded to the weight's dtype, is exactly the new weight: the
    number next to x, or, if x is less than 2**-12 of the old weight, the next one that such a sum can give.

    Args:
        x: the new weight, float32.
        stored: the old weight.
        rounding: the recipe's rounding of weights, "kahan" or "stochastic".
        random: bits for stochastic rounding, of the weight or of its remainder.
    """
    format, old = format_of(stored), stored.astype(jnp.float32)
    if rounding == "stochastic":
        rounded = cast_stochastically(x, format, random).astype(jnp.float32)
    else:
        rounded = nearest(x, format)
    rounded = nearest(old + (rounded - old), format)
    if rounding == "stochastic":
        return rounded - old, None
    codes = jnp.floor((x - rounded) / _fraction(rounded, format) + (random >> np.uint32(8)) * 2.0**-24)
    return rounded - old, jnp.clip(codes, -128, 127).astype(jnp.int8)


def _fraction(weight: jax.Array, format: formats.Format) -> jax.Array:
    """A 256th of the last bit of each weight, a power of two. XLA takes subnormal numbers of float32 for 0,
    so it is not less than 2**-115 for the smallest bfloat16 weights."""
    binade = lax.max(lax.abs(weight), jnp.float32(max(format.smallest_normal, 2.0**-100)))
    bits = lax.bitcast_convert_type(binade, jnp.uint32) & np.uint32(0x7F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) * 2.0 ** (-format.mantissa_bits - 8)


def with_scale(stored: Any, scale: jax.Array) -> Any:
    """A `ScaledArray` or `Root` with another scale."""
    if isinstance(stored, Root):
        return Root(with_scale(stored.root, scale))
    return ScaledArray(stored.data, scale)


def select(ok: jax.Array, new: Any, old: Any) -> Any:
    """`new` if `ok`, else `old`; both in the same storage format."""
    return jax.tree.map(lambda new, old: _select(ok, new, old), new, old)


def _select(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating) or new.dtype == jnp.float32:
        return jnp.where(ok, new, old)
    # As integers, because XLA on CPU converts float8 to float16 to select.
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)
