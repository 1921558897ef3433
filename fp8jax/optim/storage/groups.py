"""Power-of-two scales for each 128 entries of an array's last axis, stored as biased exponents in uint8."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GROUP = 128


def first_exponents(like: jax.Array) -> jax.Array:
    """Exponents of scales 1 for an array: uint8, an entry of the last axis for each 128 of the array's."""
    return jnp.full(_grouped(jnp.zeros(like.shape, jnp.uint8)).shape[:-1], 127, jnp.uint8)


def exponents_of(x: jax.Array) -> jax.Array:
    """The exponents of the smallest scales that are not less than any entry of their group.

    `x` is float32 and has no sign; inf and NaN give the largest exponent.
    """
    # The exponent of each entry, rounded up, because XLA computes nothing in the kernel of a reduction after
    # it.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponents = jnp.clip((bits + np.uint32((1 << 23) - 1)) >> np.uint32(23), 1, 253).astype(jnp.uint8)
    return jnp.max(_grouped(exponents), axis=-1)


def per_entry(exponents: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The exponent of each entry's group in an array of this shape, uint32."""
    columns = shape[-1] if shape else 1
    size = max(1, min(GROUP, columns))
    # Indices, because XLA on a GPU starts a kernel for what it can compute before a broadcast.
    groups = lax.iota(jnp.int32, columns) // size
    return exponents.at[..., groups].get(mode="promise_in_bounds").reshape(shape).astype(jnp.uint32)


def power_of_two(exponents: jax.Array) -> jax.Array:
    """2 to the power of biased exponents, float32."""
    return lax.bitcast_convert_type(exponents << np.uint32(23), jnp.float32)


def _grouped(x: jax.Array) -> jax.Array:
    """`x` with its last dimension in groups, shape=(..., groups, entries of a group); padded with zeros."""
    x = x.reshape(x.shape or (1,))
    columns = x.shape[-1]
    size = max(1, min(GROUP, columns))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -columns % size)]) if columns % size else x
    return x.reshape(*x.shape[:-1], -(-columns // size), size)
