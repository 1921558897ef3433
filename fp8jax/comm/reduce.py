"""Gradients over devices: their mean or sum, on all of them or in parts, in FP8 on the wire.

FP8 codes are never added: on the devices' common scale, which is the largest of theirs,

    every device sends each other one its part of the codes    (all-to-all, 1 byte a number)
    adds the parts that it got in float32, and rounds the mean to codes on the same scale
    and for `all_reduce` sends these to all                     (all-gather, 1 byte a number)

The scale is one per tensor (or block) on all devices, so the mean needs no other headroom; a sum
has the mean's codes on a scale that is larger by the number of devices. Scales cross in one
collective for the whole tree, codes in one for each bucket of tensors.

References:
    FP8-LM, arXiv 2310.18313, section 2.1; MS-AMP `FP8DistributedDataParallel`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.comm import wire
from fp8jax.comm.mu import renewed
from fp8jax.recipe import Recipe
from fp8jax.scaled import (
    ScaledArray,
    is_scaled,
    quantize,
    quantize_gradient,
    to_bytes,
    value,
    without_infinities,
)
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params


def all_reduce(
    grads: Any,
    axis_name: str,
    recipe: Recipe | str = "O2",
    *,
    op: str = "mean",
    floats: str | None = None,
    mu: Any = None,
) -> Any:
    """The mean or sum of the devices' gradients; for use inside `jax.shard_map`
    with `check_vma=False`.

    Args:
        grads: `value_and_grad`'s: a tree of arrays and E4M3 `ScaledArray`s, or whole variables.
        axis_name: the mesh axis to reduce over.
        recipe: its `comm` column is read. FP8: codes cross, twice rounded to nearest even (half
            an ulp at the format's max, 16, times the scale, for each of the two stages). BF16,
            FP32: all leaves in that format.
        op: "mean" or "sum".
        floats: what float arrays cross in if comm is FP8: "FP32" or "FP8". By default FP32 beside
            `ScaledArray`s (as in MS-AMP: norms, biases, embeddings), FP8 in a tree of arrays alone.
        mu: state of the automatic scale of the parameters' gradients, see `fp8jax.comm.mu`.

    Returns:
        The same structure, dtypes and shapes, with the same values on every device; with `mu` a
        pair of that and the new state. A NaN or an infinity of one device is NaN on all. New
        scaling states are merged by max, loss scales by min.

    Raises:
        ValueError: no such `op` or `floats`.
    """
    row = _checked(recipe, op, floats)
    if has_params(grads):
        new = all_reduce(grads[PARAMS], axis_name, row, op=op, floats=floats, mu=mu)
        new, state = (new, None) if mu is None else new
        variables = {**_merged(grads, axis_name), PARAMS: new}
        return variables if mu is None else (variables, state)
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_scaled)
    narrow = _narrow(leaves, row, floats)
    dtype = jnp.float32 if row.comm == "FP8" else formats.get(row.comm).dtype
    new = [None if i in narrow else _wide(leaf, axis_name, dtype, op) for i, leaf in enumerate(leaves)]
    state = None if mu is None else treedef.flatten_up_to(mu)
    chosen = [leaves[i] for i in narrow]
    if chosen:
        devices = lax.axis_size(axis_name)
        factors = None if state is None else [state[i] for i in narrow]
        codes = wire.narrowed(chosen, axis_name, factors)
        if state is not None and factors is not None:
            for i, factor in zip(narrow, renewed(factors, chosen, codes, axis_name), strict=True):
                state[i] = factor

        def reduced(flat: jax.Array) -> jax.Array:
            rows = jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)
            return lax.all_gather(wire.mean_of_parts(rows, axis_name), axis_name, tiled=True)

        flat = [to_bytes(q.data).reshape(-1) for q in codes]
        for means, bucket in wire.in_buckets(reduced, flat):
            shapes = [codes[i].shape for i in bucket]
            for i, mean in zip(bucket, wire.unpacked(means, shapes), strict=True):
                new[narrow[i]] = _back(mean, codes[i].scale, chosen[i], op, devices)
    reduced_tree = treedef.unflatten(new)
    return reduced_tree if state is None else (reduced_tree, treedef.unflatten(state))


def reduce_scatter(
    grads: Any,
    axis_name: str,
    recipe: Recipe | str = "O2",
    *,
    op: str = "mean",
    axis: int = 0,
    floats: str | None = None,
) -> Any:
    """Each device's part of the mean or sum of the devices' gradients: `lax.psum_scatter` of a tree.

    Args:
        grads: a tree of arrays and E4M3 `ScaledArray`s, or whole variables, whose other collections
            are merged and stay whole.
        axis: the tensors' axis that is cut in as many parts as there are devices; device i of the
            mesh axis gets part i.
        axis_name, recipe, op, floats: see `all_reduce`.

    Returns:
        The same structure and dtypes. A `ScaledArray`'s scale is that of the whole tensor, so
        parts belong together; of blocks along `axis` each device has its own.

    Raises:
        ValueError: no such `op` or `floats`, or an axis does not divide by the number of devices.
    """
    row = _checked(recipe, op, floats)
    if has_params(grads):
        new = reduce_scatter(grads[PARAMS], axis_name, row, op=op, axis=axis, floats=floats)
        return {**_merged(grads, axis_name), PARAMS: new}
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_scaled)
    devices = lax.axis_size(axis_name)
    for leaf in leaves:
        _check_axis(leaf.shape, axis, devices)
    narrow = _narrow(leaves, row, floats)
    dtype = jnp.float32 if row.comm == "FP8" else formats.get(row.comm).dtype
    new = [
        None if i in narrow else _wide_part(leaf, axis_name, dtype, op, axis) for i, leaf in enumerate(leaves)
    ]
    chosen = [leaves[i] for i in narrow]
    if chosen:
        codes = wire.narrowed(chosen, axis_name)
        rows = [jnp.moveaxis(to_bytes(q.data), axis, 0).reshape(devices, -1) for q in codes]
        for means, bucket in wire.in_buckets(lambda rows: wire.mean_of_parts(rows, axis_name), rows):
            shapes = [_moved(_part(codes[i].shape, axis, devices), axis) for i in bucket]
            for i, mean in zip(bucket, wire.unpacked(means, shapes), strict=True):
                scale = _own(codes[i].scale, axis, axis_name)
                new[narrow[i]] = _back(jnp.moveaxis(mean, 0, axis), scale, chosen[i], op, devices)
    return treedef.unflatten(new)


def _checked(recipe: Recipe | str, op: str, floats: str | None) -> Recipe:
    if op not in ("mean", "sum"):
        raise ValueError(f"`op`: expected mean or sum; got {op!r}.")
    if floats not in (None, "FP32", "FP8"):
        raise ValueError(f"`floats`: expected FP32 or FP8; got {floats!r}.")
    return Recipe.parse(recipe)


def _narrow(leaves: list[Any], row: Recipe, floats: str | None) -> list[int]:
    """The numbers of the leaves that cross in FP8."""
    if row.comm != "FP8":
        return []
    too = floats == "FP8" or (floats is None and not any(map(is_scaled, leaves)))
    return [i for i, leaf in enumerate(leaves) if is_scaled(leaf) or too]


def _back(codes: jax.Array, scale: jax.Array, like: Any, op: str, devices: int) -> Any:
    """Codes of the mean, as the result of a leaf."""
    q = ScaledArray(wire.from_bytes(codes), scale * devices if op == "sum" else scale)
    return q if is_scaled(like) else q.dequantize(like.dtype)


def _wide(leaf: Any, axis_name: str, dtype: Any, op: str) -> Any:
    collective = lax.pmean if op == "mean" else lax.psum
    new = collective(value(leaf).astype(dtype), axis_name)
    return quantize_gradient(new, leaf.scale.shape) if is_scaled(leaf) else new.astype(leaf.dtype)


def _wide_part(leaf: Any, axis_name: str, dtype: Any, op: str, axis: int) -> Any:
    new = lax.psum_scatter(value(leaf).astype(dtype), axis_name, scatter_dimension=axis, tiled=True)
    if op == "mean":
        new = new / lax.axis_size(axis_name)
    if not is_scaled(leaf):
        return new.astype(leaf.dtype)
    part = quantize_gradient(new, _own(leaf.scale, axis, axis_name).shape)
    if leaf.scale.ndim and leaf.scale.shape[axis] > 1:
        return part
    # The parts of one tensor share a scale.
    [scale] = wire.common_scales([part.scale], axis_name)
    return quantize(without_infinities(new), formats.E4M3, scale)


def _own(scale: jax.Array, axis: int, axis_name: str) -> jax.Array:
    """This device's part of the scales of blocks."""
    if scale.ndim == 0 or scale.shape[axis] == 1:
        return scale
    size = scale.shape[axis] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(scale, lax.axis_index(axis_name) * size, size, axis)


def _check_axis(shape: tuple[int, ...], axis: int, devices: int) -> None:
    if axis >= len(shape) or shape[axis] % devices:
        raise ValueError(
            f"`grads`: expected tensors whose axis {axis} divides by the {devices} devices; got {shape}. "
            "Take another `axis`, or `all_reduce` for this one."
        )


def _part(shape: tuple[int, ...], axis: int, devices: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // devices, *shape[axis + 1 :])


def _moved(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])


def _merged(variables: Any, axis_name: str) -> dict[str, Any]:
    """The collections besides the parameters, the same on all devices."""
    merge = {SCALING: lax.pmax, LOSS_SCALE: lax.pmin}
    return {
        name: jax.tree.map(lambda x, name=name: merge[name](x, axis_name), tree)
        for name, tree in variables.items()
        if name != PARAMS
    }
