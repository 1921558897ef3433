"""Arrays of an optimizer as `ScaledArray`s, with the scale blocks of their parameter."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.quantization import ScaledArray, cast, cast_stochastically, expand, format_of, is_scaled


def scaled_zeros(param: Any, format: formats.Format) -> ScaledArray:
    """Zeros in a format, with the shape, scale blocks and sharding of a parameter."""
    data = jnp.zeros_like(param.data if is_scaled(param) else param, format.dtype)
    return ScaledArray(data, jnp.ones(param.scale.shape if is_scaled(param) else (), jnp.float32))


def encode_scaled(x: jax.Array, stored: ScaledArray, scale: jax.Array, random: Any = None) -> ScaledArray:
    """`x`, float32, in the format of `stored` on a new scale.

    `random` are bits for stochastic rounding; None rounds to nearest.
    """
    codes, format = x * expand(1 / scale, x.shape), format_of(stored)
    data = cast(codes, format) if random is None else cast_stochastically(codes, format, random)
    return ScaledArray(data, scale)
