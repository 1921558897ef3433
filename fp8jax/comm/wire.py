"""Helpers of the collectives: common scales, and bucketing of tensors.

A model has hundreds of tensors, and each collective has a latency, so tensors are concatenated to buckets.
FP8 codes are sent as unsigned integers, because XLA on CPU converts float8 to float16 for a collective.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.quantization import ScaledArray, amax, is_scaled, quantize, scale_of, to_bytes, without_infinities

# Entries per bucket: large enough to hide a collective's latency; the float32 sums of a bucket take 128 MiB.
BUCKET = 2**25


def narrowed(leaves: list[Any], axis_name: str, mu: Any = None) -> list[ScaledArray]:
    """Quantizes the leaves to E4M3 with common scales: the largest over the devices, divided by `mu`.

    Args:
        leaves: `ScaledArray`s, which keep their scale blocks, and float arrays, which get a power-of-two
            scale.
        axis_name: the mesh axis.
        mu: None, or a float32 scalar for each leaf.

    Returns:
        E4M3 `ScaledArray`s. Infinities become NaN, so that a bad step is detected.
    """
    leaves = [leaf if is_scaled(leaf) else without_infinities(leaf) for leaf in leaves]
    common = common_scales(leaves, axis_name)
    if mu is not None:
        common = [scale / factor for scale, factor in zip(common, mu, strict=True)]
    return [quantize(leaf, formats.E4M3, scale) for leaf, scale in zip(leaves, common, strict=True)]


def common_scales(leaves: list[Any], axis_name: str, blocks: tuple[int, ...] = ()) -> list[jax.Array]:
    """The largest scale over the devices for each leaf; one collective for all leaves.

    Devices with an all-zero tensor or block are ignored, because any scale represents zeros.

    Args:
        leaves: `ScaledArray`s, and float arrays, which get power-of-two scales for E4M3.
        axis_name: the mesh axis.
        blocks: the shape of a float array's scales.
    """

    def vote(leaf: Any) -> jax.Array:
        if is_scaled(leaf):
            return jnp.where(amax(leaf, leaf.scale.shape) == 0, 0.0, leaf.scale)
        return scale_of(amax(leaf, blocks), formats.E4M3.max, power_of_two=True, otherwise=0.0)

    votes = [vote(leaf) for leaf in leaves]
    packed = lax.pmax(jnp.concatenate([each.reshape(-1) for each in votes]), axis_name)
    return list(unpacked(jnp.where(packed > 0, packed, 1.0), [each.shape for each in votes]))


def unpacked(flat: jax.Array, shapes: list[tuple[int, ...]]) -> Iterator[jax.Array]:
    """Splits the last axis into consecutive parts of these shapes; leading axes stay."""
    start, leading = 0, flat.shape[:-1]
    for shape in shapes:
        size = math.prod(shape)
        yield flat[..., start : start + size].reshape(*leading, *shape)
        start += size


def in_buckets(
    function: Callable[[jax.Array], jax.Array], tensors: list[jax.Array]
) -> Iterator[tuple[jax.Array, list[int]]]:
    """Yields `function` of each bucket, and the indices of its tensors. A bucket concatenates tensors along
    their last axis, up to `BUCKET` entries; a larger tensor is a bucket alone."""
    bucket: list[int] = []
    for number, tensor in enumerate(tensors):
        if bucket and sum(tensors[i].size for i in bucket) + tensor.size > BUCKET:
            yield function(jnp.concatenate([tensors[i] for i in bucket], axis=-1)), bucket
            bucket = []
        bucket.append(number)
    if bucket:
        yield function(jnp.concatenate([tensors[i] for i in bucket], axis=-1)), bucket


def means_of_parts(tensors: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """The means over the devices of the rows for this device.

    Args:
        tensors: uint8 E4M3 codes, shape=(devices, n); row i is for device i.
        axis_name: the mesh axis.

    Returns:
        uint8 E4M3 codes with the same scale, shape=(n,) each. The mean is computed in float32 and rounded
        once; it cannot saturate.
    """

    def mean(rows: jax.Array) -> jax.Array:
        parts = lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0)
        mean = jnp.mean(from_bytes(parts).astype(jnp.float32), axis=0)
        return to_bytes(quantize(mean, formats.E4M3, 1.0).data)

    return _in_buckets_of_one_dtype(mean, tensors)


def gathered(parts: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """All-gathers flat arrays of shape (n,) and any dtype to arrays of shape (devices, n)."""
    new: list[Any] = [None] * len(parts)
    for dtype in sorted({str(part.dtype) for part in parts}):
        alike = [i for i, part in enumerate(parts) if str(part.dtype) == dtype]
        rows = _in_buckets_of_one_dtype(
            lambda flat: lax.all_gather(flat, axis_name), [parts[i] for i in alike]
        )
        for i, row in zip(alike, rows, strict=True):
            new[i] = row
    return new


def _in_buckets_of_one_dtype(
    function: Callable[[jax.Array], jax.Array], tensors: list[jax.Array]
) -> list[jax.Array]:
    new: list[Any] = [None] * len(tensors)
    for joined, bucket in in_buckets(function, tensors):
        for i, part in zip(bucket, unpacked(joined, [tensors[i].shape[-1:] for i in bucket]), strict=True):
            new[i] = part
    return new


def from_bytes(codes: jax.Array) -> jax.Array:
    """Bitcasts uint8 to E4M3 codes."""
    return lax.bitcast_convert_type(codes, formats.E4M3.dtype)
