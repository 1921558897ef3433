"""The mean of gradients over devices, in the format of the recipe's `comm` column.

FP8 codes are never added: on the devices' common scale, which is the largest of theirs,

    every device sends each other one its part of the codes    (all-to-all, 1 byte a number)
    adds the parts that it got in float32, and rounds the mean to codes on the same scale
    and sends these to all                                     (all-gather, 1 byte a number)

The scale is one per tensor (or block) on all devices, so the mean needs no other headroom. The
codes travel as uint8: XLA on CPU would make float16 of a float8 collective.

References:
    FP8-LM, arXiv 2310.18313, section 2.1; MS-AMP `FP8DistributedDataParallel`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.recipe import Recipe
from fp8jax.scaled import ScaledArray, is_scaled, quantize, quantize_gradient, to_bytes, value
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params


def all_reduce(grads: Any, axis_name: str, recipe: Recipe | str = "O2") -> Any:
    """The mean of the devices' gradients; for use inside `jax.shard_map`.

    Args:
        grads: `value_and_grad`'s: a tree of arrays and E4M3 `ScaledArray`s, or whole variables.
        axis_name: the mesh axis to average over.
        recipe: its `comm` column is read. FP8: `ScaledArray`s cross as FP8 codes, twice rounded
            to nearest even (the mean within 1/16 of the largest at most); other leaves, such as
            the gradients of norms and biases, in float32. BF16, FP32: all leaves in that format.

    Returns:
        The same structure, dtypes and shapes, with the same values on every device. A NaN of
        one device is NaN on all. New scaling states are merged by max, loss scales by min.

    Raises:
        ValueError: comm is FP8 and no gradient is a `ScaledArray`.
    """
    row = Recipe.parse(recipe)
    if has_params(grads):
        merge = {SCALING: lax.pmax, LOSS_SCALE: lax.pmin}
        others = {
            name: jax.tree.map(lambda x, name=name: merge[name](x, axis_name), tree)
            for name, tree in grads.items()
            if name != PARAMS
        }
        return {**others, PARAMS: all_reduce(grads[PARAMS], axis_name, row)}
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_scaled)
    if row.comm != "FP8":
        dtype = formats.get(row.comm).dtype
        return treedef.unflatten([_wide_mean(leaf, axis_name, dtype) for leaf in leaves])
    if not any(map(is_scaled, leaves)):
        raise ValueError(
            f"`grads`: {row} sends FP8 gradients, and none of these is a ScaledArray; use a recipe with "
            "weight_grad=E4M3, or comm=FP32."
        )
    scales = _common_scales([leaf.scale for leaf in leaves if is_scaled(leaf)], axis_name)
    mean = [
        _narrow_mean(leaf, next(scales), axis_name)
        if is_scaled(leaf)
        else _wide_mean(leaf, axis_name, jnp.float32)
        for leaf in leaves
    ]
    return treedef.unflatten(mean)


def _wide_mean(leaf: Any, axis_name: str, dtype: Any) -> Any:
    mean = lax.pmean(value(leaf).astype(dtype), axis_name)
    if is_scaled(leaf):
        return quantize_gradient(mean, leaf.scale.shape)
    return mean.astype(leaf.dtype)


def _common_scales(scales: list[jax.Array], axis_name: str) -> Any:
    """The largest of each scale over the devices, one after the other; one collective for all."""
    packed = lax.pmax(jnp.concatenate([scale.reshape(-1) for scale in scales]), axis_name)
    start = 0
    for scale in scales:
        yield packed[start : start + scale.size].reshape(scale.shape)
        start += scale.size


def _narrow_mean(leaf: ScaledArray, scale: jax.Array, axis_name: str) -> ScaledArray:
    devices = lax.axis_size(axis_name)
    codes = to_bytes(quantize(leaf, formats.E4M3, scale).data).reshape(-1)
    parts = jnp.pad(codes, (0, -codes.size % devices)).reshape(devices, -1)
    parts = lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0)
    # In units of the scale: no mean of codes is larger than a code can be.
    mean = jnp.mean(_from_bytes(parts).astype(jnp.float32), axis=0)
    mean = lax.all_gather(to_bytes(quantize(mean, formats.E4M3, 1.0).data), axis_name, tiled=True)
    return ScaledArray(_from_bytes(mean[: codes.size].reshape(leaf.shape)), scale)


def _from_bytes(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, formats.E4M3.dtype)
