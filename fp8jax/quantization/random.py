"""Random bits for stochastic rounding, from a counter.

    seeds = leaf_seeds(key, count, leaves)
    bits = random_bits(seeds[0], weight.shape)

A bit depends on the key, the step, the leaf and the entry's place in the whole tensor. So it is the same for
any sharding, and a GPU computes it inside of the kernel that rounds. `jax.random.bits` takes ten times as
many operations, and needs the whole tensor on each device.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

_ODD = np.uint32(0x9E3779B9)  # 2**32 / golden ratio: consecutive numbers are spread far apart


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
