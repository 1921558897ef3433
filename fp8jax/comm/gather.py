"""All-gather of sharded tensors in their storage format."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from fp8jax.comm import buckets
from fp8jax.comm.reduce import at, check_float, has_blocks_along
from fp8jax.platforms import checked_axes
from fp8jax.quantization import ScaledArray, is_scaled, like_gradient, to_bits


def all_gather(
    tree: PyTree, axis_name: str | Sequence[str], *, axis: int = 0, floats: str = "FP32"
) -> PyTree:
    """`lax.all_gather(..., tiled=True)` of a tree; for use inside `jax.shard_map` with `check_vma=False`.

    Args:
        tree: this device's shards, arrays and `ScaledArray`s; gradients stay gradients.
        axis_name: the mesh axis of the shards, or several.
        axis: the tensors' axis along which shards are concatenated, device 0's first.
        floats: how float arrays are sent. "FP32": in their dtype. "FP8": as E4M3 codes with one power-of-two
            scale for the whole tensor, rounded once, and returned in their dtype.

    Returns:
        The same structure and dtypes. `ScaledArray`s are sent as codes, 1 or 2 bytes per entry. Shards with
        different scales are first requantized with the largest scale. With power-of-two scales this is exact,
        except for values below the format's smallest step. Scale blocks along `axis` keep their scales.

    Raises:
        ValueError: `floats` is not legal, a leaf has no such axis, a leaf to be sent in FP8 has another dtype
            than a float's, or `axis_name` is not mapped over.
    """
    if floats not in ("FP32", "FP8"):
        raise ValueError(f"`floats`: expected FP32 or FP8; got {floats!r}.")
    names = checked_axes(axis_name)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_scaled)
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_scaled):
        if floats == "FP8":
            check_float("tree", path, leaf, "Send others with floats='FP32', which keeps every dtype.")
        shape = leaf.shape if is_scaled(leaf) else jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"`tree`: expected tensors with an axis {axis}; got {shape}{at(path)}. Take another "
                "`axis` for this one."
            )
    in_fp8 = [i for i, leaf in enumerate(leaves) if is_scaled(leaf) or floats == "FP8"]
    shared = [i for i in in_fp8 if not is_scaled(leaves[i]) or not has_blocks_along(leaves[i].scale, axis)]
    new = {
        i: lax.all_gather(x, names, axis=axis, tiled=True) for i, x in enumerate(leaves) if i not in in_fp8
    }
    codes = {i: leaves[i] for i in in_fp8}
    if shared:
        codes |= zip(shared, buckets.on_common_scales([leaves[i] for i in shared], names), strict=True)
    whole = whole_from_parts(list(codes.values()), [axis] * len(codes), names)
    for i, q in zip(codes, whole, strict=True):
        if i not in shared:
            scale = lax.all_gather(q.scale, names, axis=axis, tiled=True)
            q = ScaledArray(q.data, scale)
        is_codes = is_scaled(leaves[i])
        new[i] = like_gradient(leaves[i], q, True) if is_codes else q.dequantize(leaves[i].dtype)
    return treedef.unflatten([new[i] for i in range(len(leaves))])


def whole_from_parts(parts: list[Any], axes: list[int], axis_name: str) -> list[Any]:
    """All-gathers arrays and `ScaledArray`s, each along its axis, in few collectives; `ScaledArray`s keep
    this device's scales."""
    devices = lax.axis_size(axis_name)
    arrays = [part.data if is_scaled(part) else part for part in parts]
    # 8 and 16 bits are sent as unsigned integers, because XLA on CPU widens floats for a collective.
    bits = [to_bits(array) if array.dtype.itemsize < 4 else array for array in arrays]
    rows = buckets.gathered([each.reshape(-1) for each in bits], axis_name)
    whole = []
    for part, array, axis, row in zip(parts, arrays, axes, rows, strict=True):
        axis %= array.ndim
        shape = (*array.shape[:axis], array.shape[axis] * devices, *array.shape[axis + 1 :])
        new = jnp.moveaxis(row.reshape(devices, *array.shape), 0, axis).reshape(shape)
        new = lax.bitcast_convert_type(new, array.dtype)
        whole.append(ScaledArray(new, part.scale) if is_scaled(part) else new)
    return whole
