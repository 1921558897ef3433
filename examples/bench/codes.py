"""Codes of other libraries for Adam's moments, restated: of FlashOptim 0.1.4, and of COAT (arXiv 2410.19313).

moment = decode(encode(moment, is_second=False), moment.shape, is_second=False)     # FlashOptim's
moment = through_coat(moment)
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

GROUP, OF_COAT = 32, 128  # entries with one scale
_LEAST = 1e-12  # of a group's largest magnitude
_E4M3_MAX = 448


class Coded(NamedTuple):
    """A moment in a byte, with a float16 scale for each group of 32."""

    codes: jax.Array
    scale: jax.Array


def _groups(x: jax.Array, size: int = GROUP) -> jax.Array:
    return jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(-1, size)


def encode(x: jax.Array, is_second: bool) -> Coded:
    """A first moment by a softsign of its share of the largest; a second one by the share of its root."""
    groups = _groups(jnp.sqrt(x) if is_second else x)
    largest = jnp.maximum(jnp.max(jnp.abs(groups), axis=1), _LEAST)
    share = groups / largest[:, None]
    if is_second:
        return Coded(jnp.floor(share * 255 + 0.5).astype(jnp.uint8), largest.astype(jnp.float16))
    codes = jnp.floor(2 * share / (1 + jnp.abs(share)) * 127 + 0.5)
    return Coded(codes.astype(jnp.int8), largest.astype(jnp.float16))


def decode(coded: Coded, shape: tuple[int, ...], is_second: bool) -> jax.Array:
    """The moment, float32."""
    codes, scale = coded.codes.astype(jnp.float32), coded.scale.astype(jnp.float32)[:, None]
    if is_second:
        values = jnp.square(codes / 255 * scale)
    else:
        values = codes / 127 / (2 - jnp.abs(codes / 127)) * scale
    return values.reshape(-1)[: math.prod(shape)].reshape(shape)


def through_coat(x: jax.Array) -> jax.Array:
    """A moment, float32, rounded to COAT's code: E4M3 after a power that fits each group of 128 to its range.

    The power is a multiple of 1/16, at least that, and takes the ratio of a group's largest magnitude to its
    smallest that is not zero into half of E4M3's square. Rounding is to nearest.
    """
    groups = _groups(x, OF_COAT)
    size = jnp.abs(groups)
    largest = jnp.max(size, axis=1, keepdims=True)
    least = jnp.minimum(jnp.min(jnp.where(size > 0, size, jnp.inf), axis=1, keepdims=True), largest)
    spread = jnp.maximum(jnp.log2(largest) - jnp.log2(least), 1e-4)
    power = jnp.maximum(jnp.floor(16 * jnp.log2(_E4M3_MAX**2 / 2) / spread) / 16, 1 / 16)
    middle = jnp.exp2((jnp.log2(largest) + jnp.log2(least)) / 2)
    unit = (largest / middle) ** power / _E4M3_MAX
    rounded = ((size / middle) ** power / unit).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    values = jnp.where(size > 0, jnp.sign(groups) * (rounded * unit) ** (1 / power) * middle, 0)
    return values.reshape(-1)[: x.size].reshape(x.shape)
