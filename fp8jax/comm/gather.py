"""Tensors of which each device has a part, whole on all of them, in the format they are kept in."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.comm import wire
from fp8jax.scaled import ScaledArray, format_of, is_scaled, quantize, to_bits


def all_gather(tree: Any, axis_name: str, *, axis: int = 0, floats: str = "FP32") -> Any:
    """`lax.all_gather(..., tiled=True)` of a tree; for use inside `jax.shard_map`
    with `check_vma=False`.

    Args:
        tree: arrays and `ScaledArray`s: this device's parts.
        axis_name: the mesh axis that the parts are spread over.
        axis: the tensors' axis along which parts are put together, device 0's first.
        floats: "FP32": float arrays cross as they are; "FP8": as E4M3 codes on one power-of-two
            scale for the whole tensor, rounded once, and come back in their dtype.

    Returns:
        The same structure and dtypes. `ScaledArray`s cross as their codes, 1 or 2 bytes a number.
        Parts on different scales are put on the largest first: exactly, for power-of-two scales,
        but for what falls below the format's smallest step. Blocks along `axis` keep theirs.

    Raises:
        ValueError: no such `floats`.
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
    """Arrays of which each device has a part along an axis, whole; in few collectives."""
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
    """Whether each device has scales of its own blocks."""
    return scale.ndim > 0 and scale.shape[axis] > 1
