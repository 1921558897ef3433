"""All-reduce and reduce-scatter of gradients, sent in FP8.

FP8 codes cannot be added. All devices quantize with a common scale, the largest of their scales. Then

    each device sends every other device its shard of the codes        (all-to-all, 1 byte per entry)
    each device computes the mean in float32 and rounds it to codes with the same scale
    for `all_reduce` each device sends these codes to all devices      (all-gather, 1 byte per entry)

All devices share one scale per tensor (or block), so the mean cannot saturate. A sum has the codes of the
mean, and its scale is multiplied by the number of devices. One collective sends the scales of the whole tree.
The codes take one collective per bucket of tensors.

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
from fp8jax.comm.zero import own_part
from fp8jax.quantization import (
    ScaledArray,
    is_scaled,
    like_gradient,
    quantize,
    quantize_gradient,
    to_bytes,
    value,
    without_infinities,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.merge import marked, unmarked
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, Gradients, has_params, with_collections


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
        grads: gradients from `value_and_grad`: a tree of arrays and E4M3 `ScaledArray`s, or whole variables.
        axis_name: the mesh axis to reduce over.
        recipe: sets the format by its `comm` column. FP8: codes are sent, and rounded to nearest even twice;
            each rounding has an error of at most half an ulp at the format's max, 16, times the scale. BF16,
            FP32: all leaves are sent in this format.
        op: "mean" or "sum".
        floats: format in which float arrays are sent if `comm` is FP8: "FP32" or "FP8". The default is FP32
            in a tree with `ScaledArray`s (as in MS-AMP: norms, biases, embeddings), FP8 in a tree without.
        mu: automatic scaling state of the parameters' gradients, see `fp8jax.comm.mu`.

    Returns:
        The same structure, dtypes and shapes, with the same values on every device; with `mu` a pair of these
        gradients and the new state. NaN or inf on one device is NaN on all. New scaling states are merged by
        max, loss scales by min.

    Raises:
        ValueError: `op` or `floats` is not legal.
    """
    row = _checked(recipe, op, floats)
    if has_params(grads):
        new = all_reduce(grads[PARAMS], axis_name, row, op=op, floats=floats, mu=mu)
        new, state = (new, None) if mu is None else new
        variables = with_collections(grads, {**merged(grads, axis_name), PARAMS: new}, Gradients)
        return variables if mu is None else (variables, state)
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_scaled)
    factors = None if mu is None else treedef.flatten_up_to(mu)
    new, factors = reduced(leaves, [None] * len(leaves), axis_name, row, op=op, floats=floats, mu=factors)
    tree = treedef.unflatten(map(like_gradient, leaves, new))
    return tree if factors is None else (tree, treedef.unflatten(factors))


def reduce_scatter(
    grads: Any,
    axis_name: str,
    recipe: Recipe | str = "O2",
    *,
    op: str = "mean",
    axis: int = 0,
    floats: str | None = None,
) -> Any:
    """Each device's shard of the mean or sum of the devices' gradients: `lax.psum_scatter` of a tree.

    Args:
        grads: a tree of arrays and E4M3 `ScaledArray`s, or whole variables. Other collections are merged and
            replicated.
        axis: the tensors' axis to shard; device i of the mesh axis gets shard i.
        axis_name, recipe, op, floats: see `all_reduce`.

    Returns:
        The same structure and dtypes. All shards of a `ScaledArray` have the scale of the whole tensor. With
        scale blocks along `axis`, each device has the scales of its shard.

    Raises:
        ValueError: `op` or `floats` is not legal, or an axis is not divisible by the number of devices.
    """
    row = _checked(recipe, op, floats)
    if has_params(grads):
        new = reduce_scatter(grads[PARAMS], axis_name, row, op=op, axis=axis, floats=floats)
        return with_collections(grads, {**merged(grads, axis_name), PARAMS: new}, Gradients)
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_scaled)
    for leaf in leaves:
        _check_axis(leaf.shape, axis, lax.axis_size(axis_name))
    new, _ = reduced(leaves, [axis] * len(leaves), axis_name, row, op=op, floats=floats)
    return treedef.unflatten(map(like_gradient, leaves, new))


def reduced(
    leaves: list[Any],
    axes: list[int | None],
    axis_name: str,
    row: Recipe,
    *,
    op: str = "mean",
    floats: str | None = None,
    mu: list[jax.Array] | None = None,
) -> tuple[list[Any], list[jax.Array] | None]:
    """The means or sums of leaves, and the new factors mu, if given.

    Args:
        leaves: gradients, arrays and E4M3 `ScaledArray`s.
        axes: for each leaf the axis to reduce-scatter along; None for all-reduce.
        axis_name, row, op, floats: see `all_reduce`.
        mu: a factor for each leaf, see `fp8jax.comm.mu`.
    """
    devices = lax.axis_size(axis_name)
    if devices == 1 and mu is None:
        return leaves, mu  # no communication
    narrow = _narrow(leaves, row, floats)
    dtype = jnp.float32 if row.comm == "FP8" else formats.get(row.comm).dtype
    new: list[Any] = [None] * len(leaves)
    wide = [i for i in range(len(leaves)) if i not in narrow]
    whole = [i for i in wide if axes[i] is None]
    for means, bucket in wire.in_buckets(
        lambda flat: (lax.pmean if op == "mean" else lax.psum)(flat, axis_name),
        [value(leaves[i]).astype(dtype).reshape(-1) for i in whole],
    ):
        shapes = [leaves[whole[i]].shape for i in bucket]
        for i, mean in zip(bucket, wire.unpacked(means, shapes), strict=True):
            leaf = leaves[whole[i]]
            as_codes = is_scaled(leaf)
            new[whole[i]] = quantize_gradient(mean, leaf.scale.shape) if as_codes else mean.astype(leaf.dtype)
    for i in wide:
        if i not in whole:
            new[i] = wide_part(leaves[i], axis_name, dtype, op, axes[i])
    chosen = [leaves[i] for i in narrow]
    if not chosen:
        return new, mu
    factors = None if mu is None else [mu[i] for i in narrow]
    codes = wire.narrowed(chosen, axis_name, factors)
    if mu is not None and factors is not None:
        mu = list(mu)
        for i, factor in zip(narrow, renewed(factors, chosen, codes, axis_name), strict=True):
            mu[i] = factor
    means = wire.means_of_parts(
        [rows_for_devices(q, axes[i], devices) for i, q in zip(narrow, codes, strict=True)], axis_name
    )
    is_whole = [axes[i] is None for i in narrow]
    gathered = iter(
        wire.gathered([mean for mean, whole in zip(means, is_whole, strict=True) if whole], axis_name)
    )
    for i, q, mean in zip(narrow, codes, means, strict=True):
        axis, scale = axes[i], q.scale
        if axis is None:
            mean = next(gathered).reshape(-1)[: q.size].reshape(q.shape)
        else:
            mean = from_row(mean, q.shape, axis, devices)
            scale = _own(scale, axis, axis_name)
        new[i] = _back(mean, scale, leaves[i], op, devices)
    return new, mu


def on_shared_scale(part: jax.Array, blocks: tuple[int, ...], axis_name: str) -> ScaledArray:
    """Quantizes a shard of a float32 weight gradient to E4M3, with the same scales on all devices."""
    part = without_infinities(part)
    [scale] = wire.common_scales([part], axis_name, blocks)
    return quantize(part, formats.E4M3, scale)


def rows_for_devices(q: ScaledArray, axis: int | None, devices: int) -> jax.Array:
    """The codes of a tensor as bytes, shape=(devices, n); row i is for device i."""
    if axis is not None:
        return jnp.moveaxis(to_bytes(q.data), axis, 0).reshape(devices, -1)
    flat = to_bytes(q.data).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)


def from_row(row: jax.Array, shape: tuple[int, ...], axis: int, devices: int) -> jax.Array:
    """The shard along `axis` of a tensor with `shape`, from its row of `rows_for_devices`."""
    axis %= len(shape)
    rest = (*shape[:axis], *shape[axis + 1 :])
    return jnp.moveaxis(row.reshape(shape[axis] // devices, *rest), 0, axis)


def _checked(recipe: Recipe | str, op: str, floats: str | None) -> Recipe:
    if op not in ("mean", "sum"):
        raise ValueError(f"`op`: expected mean or sum; got {op!r}.")
    if floats not in (None, "FP32", "FP8"):
        raise ValueError(f"`floats`: expected FP32 or FP8; got {floats!r}.")
    return Recipe.parse(recipe)


def _narrow(leaves: list[Any], row: Recipe, floats: str | None) -> list[int]:
    """The indices of the leaves that are sent in FP8."""
    if row.comm != "FP8":
        return []
    too = floats == "FP8" or (floats is None and not any(map(is_scaled, leaves)))
    return [i for i, leaf in enumerate(leaves) if is_scaled(leaf) or too]


def _back(codes: jax.Array, scale: jax.Array, like: Any, op: str, devices: int) -> Any:
    """The result for a leaf, from the codes of the mean."""
    q = ScaledArray(wire.from_bytes(codes), scale * devices if op == "sum" else scale)
    return q if is_scaled(like) else q.dequantize(like.dtype)


def wide_part(leaf: Any, axis_name: str, dtype: Any, op: str, axis: Any) -> Any:
    """Reduce-scatters a leaf, sent in `dtype`; in the format of the leaf."""
    new = lax.psum_scatter(
        value(leaf).astype(dtype), axis_name, scatter_dimension=axis % leaf.ndim, tiled=True
    )
    if op == "mean":
        new = new / lax.axis_size(axis_name)
    if not is_scaled(leaf):
        return new.astype(leaf.dtype)
    if leaf.scale.ndim and leaf.scale.shape[axis] > 1:
        return quantize_gradient(new, _own(leaf.scale, axis, axis_name).shape)
    return on_shared_scale(new, leaf.scale.shape, axis_name)


def _own(scale: jax.Array, axis: int, axis_name: str) -> jax.Array:
    """This device's shard of the scales; the whole scale without blocks along `axis`."""
    return own_part(scale, axis if scale.ndim and scale.shape[axis] > 1 else None, axis_name)


def _check_axis(shape: tuple[int, ...], axis: int, devices: int) -> None:
    if axis >= len(shape) or shape[axis] % devices:
        raise ValueError(
            f"`grads`: expected tensors whose axis {axis} divides by the {devices} devices; got {shape}. "
            "Take another `axis`, or `all_reduce` for this one."
        )


def merged(variables: Any, axis_name: str) -> dict[str, Any]:
    """The collections other than "params", merged over the devices. All scaling states must be of the same
    step."""

    def over(reduce: Any, tree: Any) -> Any:
        return jax.tree.map(lambda x: reduce(x, axis_name), tree)

    merge = {
        SCALING: lambda states: unmarked(over(lax.pmax, marked(states))),
        LOSS_SCALE: lambda state: over(lax.pmin, state),
    }
    return {name: merge[name](tree) for name, tree in variables.items() if name != PARAMS}
