"""Encoding and decoding of optimizer states in their storage formats.

| storage of a moment | bytes per entry | scale |
|---|---|---|
| float32 array | 4 | none |
| `ScaledArray` of E4M3 or FP16 | 1 or 2 | a power of two for each scale block of the parameter |
| each of `storage.STORAGES` | | |
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.optim.storage import STORAGES, Storage
from fp8jax.optim.storage.base import encode_scaled, scaled_zeros
from fp8jax.quantization import (
    ScaledArray,
    amax_of_floats,
    format_of,
    is_scaled,
    scale_of,
    to_bits,
    value,
)


def zeros(param: Any, name: str, *, signed: bool) -> Any:
    """Zeros in the storage of this name, with the shape, scale blocks and sharding of a parameter.

    Raises:
        NotImplementedError: `STORAGES` has no entry for a name that is not the name of a format.
    """
    if name in STORAGES:
        return STORAGES[name].zeros(param, signed=signed)
    if name == formats.FP32.name:
        return jnp.zeros_like(param.data if is_scaled(param) else param, formats.FP32.dtype)
    if name not in {format.name for format in formats.ALL}:
        raise NotImplementedError(
            "moments: expected the name of a number format or an entry in `fp8jax.optim.storage.STORAGES`; "
            f"got {name!r} and entries for {', '.join(STORAGES)}."
        )
    return scaled_zeros(param, formats.get(name))


def decode(stored: Any) -> jax.Array:
    """The dequantized value, float32."""
    return stored.dequantize() if isinstance(stored, Storage) else value(stored).astype(jnp.float32)


def name_of(stored: Any) -> str:
    """The name of the storage of a moment, or the format of an array."""
    if isinstance(stored, Storage):
        return stored.name
    try:
        return format_of(stored).name
    except StopIteration:
        return str(stored.dtype)


def maxima_of(x: jax.Array, stored: Any) -> Any:
    """`Storage.maxima`; None for arrays."""
    return stored.maxima(x) if isinstance(stored, Storage) else None


def scaled_part(stored: Any) -> Any:
    """The `ScaledArray` of a storage; None if it has none."""
    stored = stored.scaled if isinstance(stored, Storage) else stored
    return stored if is_scaled(stored) else None


def before_rounding(x: jax.Array, stored: Any) -> jax.Array:
    """The value that rounding sees when `x` is stored as `stored`: its root, or itself."""
    return stored.before_rounding(x) if isinstance(stored, Storage) else x


def encode(x: jax.Array, stored: Any, scale: Any, random: Any = None) -> Any:
    """`x` in the format of `stored`.

    Args:
        x: the new value, float32.
        stored: the old value, in its storage format.
        scale: the new scale of `scaled_part`, or the `maxima_of` a storage without one.
        random: bits for stochastic rounding; None rounds to nearest.
    """
    if isinstance(stored, Storage):
        return stored.encode(x, scale, random)
    return encode_scaled(x, stored, scale, random) if is_scaled(stored) else x


def encode_alone(x: jax.Array, stored: Any) -> Any:
    """`x`, float32, in the format of `stored`, rounded to nearest on a scale of its own."""
    part = scaled_part(stored)
    if part is None:
        return encode(x, stored, maxima_of(x, stored))
    amax = amax_of_floats(before_rounding(x, stored), part.scale.shape)
    return encode(x, stored, scale_of(amax, format_of(part).max, power_of_two=True))


def with_scale(stored: Any, scale: jax.Array) -> Any:
    """A `ScaledArray`, or a storage with one, with another scale."""
    if isinstance(stored, Storage):
        return jax.tree.map(lambda part: with_scale(part, scale), stored, is_leaf=is_scaled)
    return ScaledArray(stored.data, scale)


def select(ok: jax.Array, new: Any, old: Any) -> Any:
    """`new` if `ok`, else `old`; both in the same storage format."""
    return jax.tree.map(lambda new, old: _select(ok, new, old), new, old)


def _select(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating) or new.dtype == jnp.float32:
        return jnp.where(ok, new, old)
    # As integers, because XLA on CPU converts float8 to float16 to select.
    return lax.bitcast_convert_type(jnp.where(ok, to_bits(new), to_bits(old)), new.dtype)
