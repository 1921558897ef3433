"""Helpers of the collectives: common scales, and bucketing of tensors.

A model has hundreds of tensors, and each collective has a latency, so tensors are concatenated to buckets.
FP8 codes are sent as unsigned integers, because XLA on CPU converts float8 to float16 for a collective.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.quantization import (
    ScaledArray,
    amax,
    format_of,
    from_bytes,
    is_scaled,
    quantize_by,
    scale_of,
    to_bytes,
    without_infinities,
)

# Entries per bucket: large enough to hide a collective's latency; the float32 sums of a bucket take 128 MiB.
BUCKET = 2**25


def on_common_scales(
    leaves: list[Any], axis_name: str, blocks: tuple[int, ...] = (), *, mu: list[jax.Array] | None = None
) -> list[ScaledArray]:
    """Quantizes the leaves with the same scales on all devices: the largest, divided by `mu`.

    Args:
        leaves: `ScaledArray`s, which keep their formats and scale blocks, and float arrays, which get E4M3
            codes and power-of-two scales.
        axis_name: the mesh axis.
        blocks: the shape of the scales of float arrays.
        mu: None, or a float32 scalar for each leaf.

    Returns:
        `ScaledArray`s. Infinities become NaN, so that a bad step is detected.
    """
    leaves = [leaf if is_scaled(leaf) else without_infinities(leaf) for leaf in leaves]
    scales = _common_scales(leaves, axis_name, blocks)
    if mu is not None:
        scales = [scale / factor for scale, factor in zip(scales, mu, strict=True)]
    kinds = [format_of(leaf) if is_scaled(leaf) else formats.E4M3 for leaf in leaves]
    return [quantize_by(*each) for each in zip(leaves, kinds, scales, strict=True)]


def _common_scales(leaves: list[Any], axis_name: str, blocks: tuple[int, ...]) -> list[jax.Array]:
    """The largest scale over the devices for each leaf; one collective for all leaves.

    Devices with an all-zero tensor or block are ignored, because any scale represents zeros.
    """

    def vote(leaf: Any) -> jax.Array:
        if is_scaled(leaf):
            return jnp.where(amax(leaf, leaf.scale.shape) == 0, 0.0, leaf.scale)
        return scale_of(amax(leaf, blocks), formats.E4M3.max, power_of_two=True, otherwise=0.0)

    votes = [vote(leaf) for leaf in leaves]
    packed = lax.pmax(jnp.concatenate([each.reshape(-1) for each in votes]), axis_name)
    return list(_unpacked(jnp.where(packed > 0, packed, 1.0), [each.shape for each in votes]))


def _unpacked(flat: jax.Array, shapes: list[tuple[int, ...]]) -> Iterator[jax.Array]:
    """Splits the last axis into consecutive parts of these shapes; leading axes stay."""
    start, leading = 0, flat.shape[:-1]
    for shape in shapes:
        size = math.prod(shape)
        yield flat[..., start : start + size].reshape(*leading, *shape)
        start += size


def in_buckets(
    function: Callable[[jax.Array], jax.Array], tensors: Sequence[jax.Array]
) -> Iterator[jax.Array]:
    """`function`, which keeps the last axis, of each tensor.

    It is called with buckets: several tensors concatenated along their last axis, up to `BUCKET` entries; a
    larger tensor is a bucket alone. The tensors have the same dtype and leading axes.
    """
    bucket: list[jax.Array] = []
    for tensor in [*tensors, None]:
        if bucket and (tensor is None or sum(x.size for x in bucket) + tensor.size > BUCKET):
            joined = function(jnp.concatenate(bucket, axis=-1))
            yield from _unpacked(joined, [x.shape[-1:] for x in bucket])
            bucket = []
        if tensor is not None:
            bucket.append(tensor)


def sums_of_rows(tensors: list[jax.Array], axis_name: str, divisor: int) -> list[jax.Array]:
    """The sums over the devices of this device's row of each tensor, divided by `divisor`.

    Args:
        tensors: uint8 E4M3 codes, shape=(devices, n); row i is for device i.
        axis_name: the mesh axis.
        divisor: at least the number of devices, so that no sum saturates.

    Returns:
        uint8 E4M3 codes with the same scale, shape=(n,) each, computed in float32 and rounded once.
    """

    def divided(rows: jax.Array) -> jax.Array:
        parts = lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0)
        total = jnp.sum(from_bytes(parts, formats.E4M3).astype(jnp.float32), axis=0)
        return to_bytes(quantize_by(total / divisor, formats.E4M3, 1.0).data)

    return list(in_buckets(divided, tensors))


def gathered(parts: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """All-gathers flat arrays of shape (n,) and any dtype to arrays of shape (devices, n)."""
    rows = {}
    for dtype in sorted({str(part.dtype) for part in parts}):
        alike = {i: part for i, part in enumerate(parts) if str(part.dtype) == dtype}
        whole = in_buckets(lambda flat: lax.all_gather(flat, axis_name), list(alike.values()))
        rows |= zip(alike, whole, strict=True)
    return [rows[i] for i in range(len(parts))]
