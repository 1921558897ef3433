"""All-gather of sharded tensors in their storage format."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.comm import wire
from fp8jax.quantization import ScaledArray, format_of, is_scaled, quantize, to_bits


def all_gather(tree: Any, axis_name: str, *, axis: int = 0, floats: str = "FP32") -> Any:
    """`lax.all_gather(..., tiled=True)` of a tree; for use inside `jax.shard_map`
    with `check_vma=False`.

    Args:
        tree: this device's shards, arrays and `ScaledArray`s.
        axis_name: the mesh axis of the shards.
        axis: the tensors' axis along which shards are concatenated, device 0's first.
        floats: how float arrays are sent. "FP32": in their dtype. "FP8": as E4M3 codes with one power-of-two
            scale for the whole tensor, rounded once, and returned in their dtype.

    Returns:
        The same structure and dtypes. `ScaledArray`s are sent as codes, 1 or 2 bytes per entry. Shards with
        different scales are first requantized with the largest scale. With power-of-two scales this is exact,
        except for values below the format's smallest step. Scale blocks along `axis` keep their scales.

    Raises:
        ValueError: `floats` is not legal.
    """
    if floats not in ("FP32", "FP8"):
        raise ValueError(f"`floats`: expected FP32 or FP8; got {floats!r}.")
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_scaled)
    whole: list[Any] = [None] * len(leaves)
    narrow = [i for i, leaf in enumerate(leaves) if is_scaled(leaf) or floats == "FP8"]
    for i, leaf in enumerate(leaves):
        if i not in narrow:
            whole[i] = lax.all_gather(leaf, axis_name, axis=axis, tiled=True)
    codes = dict(zip(narrow, _on_common_scales([leaves[i] for i in narrow], axis, axis_name), strict=True))
    parts = list(codes.values())
    bits = whole_from_parts([to_bits(q.data) for q in parts], [axis] * len(parts), axis_name)
    for i, part, all_bits in zip(codes, parts, bits, strict=True):
        scale = part.scale
        if _has_own(scale, axis):
            scale = lax.all_gather(scale, axis_name, axis=axis, tiled=True)
        q = ScaledArray(lax.bitcast_convert_type(all_bits, part.data.dtype), scale)
        whole[i] = q if is_scaled(leaves[i]) else q.dequantize(leaves[i].dtype)
    return treedef.unflatten(whole)


def whole_from_parts(parts: list[jax.Array], axes: list[int], axis_name: str) -> list[jax.Array]:
    """All-gathers arrays, each along its axis, in few collectives."""
    devices = lax.axis_size(axis_name)
    whole = []
    rows = wire.gathered([part.reshape(-1) for part in parts], axis_name)
    for part, axis, row in zip(parts, axes, rows, strict=True):
        axis %= part.ndim
        shape = (*part.shape[:axis], part.shape[axis] * devices, *part.shape[axis + 1 :])
        whole.append(jnp.moveaxis(row.reshape(devices, *part.shape), 0, axis).reshape(shape))
    return whole


def _on_common_scales(leaves: list[Any], axis: int, axis_name: str) -> list[ScaledArray]:
    shared = [i for i, leaf in enumerate(leaves) if is_scaled(leaf) and not _has_own(leaf.scale, axis)]
    plain = [i for i, leaf in enumerate(leaves) if not is_scaled(leaf)]
    new = list(leaves)
    if shared:
        scales = wire.common_scales([leaves[i] for i in shared], axis_name)
        for i, scale in zip(shared, scales, strict=True):
            new[i] = quantize(leaves[i], format_of(leaves[i]), scale)
    if plain:
        for i, q in zip(plain, wire.narrowed([leaves[i] for i in plain], axis_name), strict=True):
            new[i] = q
    return new


def _has_own(scale: jax.Array, axis: int) -> bool:
    """Whether the scale has blocks along `axis`, so that each device has different scales."""
    return scale.ndim > 0 and scale.shape[axis] > 1
