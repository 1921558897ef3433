"""All-reduce and reduce-scatter of gradients, sent in FP8.

FP8 codes cannot be added. All devices quantize with a common scale, the largest of their scales. Then

    each device sends every other device its shard of the codes        (all-to-all, 1 byte per entry)
    each device computes the mean in float32 and rounds it to codes with the same scale
    for `all_reduce` each device sends these codes to all devices      (all-gather, 1 byte per entry)

All devices share one scale per tensor (or block), so the mean cannot saturate. A sum is divided by the number
of devices, or by the next power of two, which multiplies its scale. One collective sends the scales of the
whole tree. The codes take one collective per bucket of tensors.

References:
    FP8-LM, arXiv 2310.18313, section 2.1; MS-AMP `FP8DistributedDataParallel`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from fp8jax import formats
from fp8jax.comm import buckets
from fp8jax.comm.auto_scaling import next_factors
from fp8jax.comm.zero import own_part
from fp8jax.platforms import checked_axes
from fp8jax.quantization import (
    ScaledArray,
    from_bytes,
    is_scaled,
    like_gradient,
    quantize_gradient,
    to_bytes,
    value,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.merge import marked, unmarked
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params


def all_reduce(
    grads: PyTree,
    axis_name: str | Sequence[str],
    recipe: Recipe | str | None = None,
    *,
    op: str = "mean",
    floats: str | None = None,
    mu: PyTree | None = None,
) -> PyTree:
    """The mean or sum of the devices' gradients; for use inside `jax.shard_map` with `check_vma=False`.

    Args:
        grads: gradients from `value_and_grad`: a tree of arrays and E4M3 `ScaledArray`s, or whole variables.
        axis_name: the mesh axis to reduce over, or several.
        recipe: sets the format by its `comm` column. FP8: codes are sent, and rounded to nearest even twice;
            each rounding has an error of at most half an ulp at the format's max, 16, times the scale. BF16,
            FP32: all leaves are sent in this format. None: the leaves decide, as in `Zero`. `ScaledArray`s
            are sent in FP8, float arrays in FP32.
        op: "mean" or "sum".
        floats: format in which float arrays are sent beside FP8: "FP32" or "FP8". Default: FP32. Only a
            recipe with comm=FP8 and a tree without `ScaledArray`s give FP8.
        mu: automatic scaling state of the parameters' gradients, see `fp8jax.comm.auto_scaling`.

    Returns:
        The same structure, dtypes and shapes, with the same values on every device; with `mu` a pair of these
        gradients and the new state. NaN on one device is NaN on all; inf is NaN where codes are sent, and in
        floats as in `jax.lax.pmean`. New scaling states are merged by max, loss scales by min. Floats of
        other collections, as batch statistics, become their mean; other arrays there stay each device's own.

    Raises:
        ValueError: `op` or `floats` is not legal, a leaf has another dtype than a float's, `axis_name` is not
            mapped over, or `mu` is given and no leaf is sent in FP8.
    """
    return _reduce(grads, axis_name, recipe, None, op, floats, mu)


def reduce_scatter(
    grads: PyTree,
    axis_name: str | Sequence[str],
    recipe: Recipe | str | None = None,
    *,
    op: str = "mean",
    axis: int = 0,
    floats: str | None = None,
) -> PyTree:
    """Each device's shard of the mean or sum of the devices' gradients, inside of a `jax.shard_map`.

    Args:
        grads: a tree of arrays and E4M3 `ScaledArray`s, or whole variables. Other collections are merged as
            by `all_reduce`.
        axis: the tensors' axis to shard; device i of the mesh axis gets shard i.
        axis_name, recipe, op, floats: see `all_reduce`.

    Returns:
        The same structure and dtypes. All shards of a `ScaledArray` have the scale of the whole tensor. With
        scale blocks along `axis`, each device has the scales of its shard.

    Raises:
        ValueError: `op` or `floats` is not legal, a leaf has another dtype than a float's, or an axis is not
            divisible by the number of devices.
    """
    return _reduce(grads, axis_name, recipe, axis, op, floats, None)


def _reduce(
    grads: Any,
    axis_name: Any,
    recipe: Recipe | str | None,
    axis: int | None,
    op: str,
    floats: str | None,
    mu: Any,
) -> Any:
    """`reduce_scatter` along `axis`, or `all_reduce` if it is None."""
    if op not in ("mean", "sum"):
        raise ValueError(f"`op`: expected mean or sum; got {op!r}.")
    if floats not in (None, "FP32", "FP8"):
        raise ValueError(f"`floats`: expected FP32 or FP8; got {floats!r}.")
    axis_name = checked_axes(axis_name)
    params = grads[PARAMS] if has_params(grads) else grads
    params = jax.tree.map(
        lambda leaf: leaf if is_scaled(leaf) else jnp.asarray(leaf), params, is_leaf=is_scaled
    )
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_scaled):
        check_float("grads", path, leaf, "Send others by `jax.lax.psum`.")
        if axis is not None:
            _check_axis(path, leaf.shape, axis, lax.axis_size(axis_name))
    factors = None if mu is None else treedef.flatten_up_to(mu)
    axes: list[int | None] = [axis] * len(leaves)
    comm = None if recipe is None else Recipe.parse(recipe).comm
    new, factors = reduced(leaves, axes, axis_name, comm, op=op, floats=floats, mu=factors)
    is_power_of_two = mu is None
    pairs = zip(leaves, new, strict=True)
    tree = treedef.unflatten(like_gradient(old, leaf, is_power_of_two) for old, leaf in pairs)
    if has_params(grads):
        tree = {**merged(grads, axis_name), PARAMS: tree}
    return tree if factors is None else (tree, treedef.unflatten(factors))


def check_float(name: str, path: Any, leaf: Any, remedy: str) -> None:
    """Raises ValueError if a leaf is neither a `ScaledArray` nor an array of floats."""
    dtype = None if is_scaled(leaf) else jnp.result_type(leaf)  # of a Python number, too
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}`: expected floats; got {dtype}{at(path)}. {remedy}")


def at(path: Any) -> str:
    """The place of a leaf in an error; nothing for a tree that is a leaf."""
    return f" at {jax.tree_util.keystr(path)}" if path else ""


def _check_axis(path: Any, shape: tuple[int, ...], axis: int, devices: int) -> None:
    if not -len(shape) <= axis < len(shape) or shape[axis] % devices:
        raise ValueError(
            f"`grads`: expected tensors whose axis {axis} divides by the {devices} devices; got {shape}"
            f"{at(path)}. Take another `axis`, or `all_reduce` for this one."
        )


def reduced(
    leaves: list[Any],
    axes: list[int | None],
    axis_name: str,
    comm: str | None,
    *,
    op: str = "mean",
    floats: str | None = None,
    mu: list[jax.Array] | None = None,
) -> tuple[list[Any], list[jax.Array] | None]:
    """The means or sums of leaves, and the new factors mu, if given.

    Args:
        leaves: gradients, arrays and E4M3 `ScaledArray`s.
        axes: for each leaf the axis to reduce-scatter along; None for all-reduce.
        axis_name, op, floats: see `all_reduce`.
        comm: the format on the wire, a recipe's `comm` column; None for FP8 of `ScaledArray`s, and FP32 of
            arrays.
        mu: a factor for each leaf, see `fp8jax.comm.auto_scaling`.
    """
    if lax.axis_size(axis_name) == 1 and mu is None:
        return leaves, mu  # no communication
    if comm is None:
        comm, floats = "FP8", floats or "FP32"
    too = floats == "FP8" or (floats is None and not any(map(is_scaled, leaves)))
    in_fp8 = [i for i, leaf in enumerate(leaves) if comm == "FP8" and (is_scaled(leaf) or too)]
    if mu and not in_fp8:
        raise ValueError(
            "`mu`: expected gradients that are sent in FP8; got none. Pass a `recipe` with comm=FP8, as "
            "'O2', or leave `mu` out."
        )
    others = [i for i in range(len(leaves)) if i not in in_fp8]
    dtype = jnp.float32 if comm == "FP8" else formats.get(comm).dtype
    sums = reduced_floats([leaves[i] for i in others], [axes[i] for i in others], axis_name, dtype, op)
    new = dict(zip(others, sums, strict=True))
    if in_fp8:
        chosen = [leaves[i] for i in in_fp8]
        factors = None if mu is None else [mu[i] for i in in_fp8]
        codes = buckets.on_common_scales(chosen, axis_name, mu=factors)
        if mu is not None and factors is not None:
            renewed = dict(zip(in_fp8, next_factors(factors, chosen, codes, axis_name), strict=True))
            mu = [renewed.get(i, factor) for i, factor in enumerate(mu)]
        sums = reduced_codes(codes, [axes[i] for i in in_fp8], axis_name, op)
        for i, q in zip(in_fp8, sums, strict=True):
            new[i] = q if is_scaled(leaves[i]) else q.dequantize(leaves[i].dtype)
    return [new[i] for i in range(len(leaves))], mu


def reduced_floats(
    leaves: list[Any], axes: list[int | None], axis_name: str, dtype: Any, op: str
) -> list[Any]:
    """The means or sums of leaves, sent in `dtype`, in the leaves' formats; see `reduced`."""
    whole = [i for i, axis in enumerate(axes) if axis is None]
    flat = [value(leaves[i]).astype(dtype).reshape(-1) for i in whole]
    all_reduce = lax.pmean if op == "mean" else lax.psum
    means = dict(zip(whole, buckets.in_buckets(lambda x: all_reduce(x, axis_name), flat), strict=True))
    new = []
    for i, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        if axis is None:
            mean = means[i].reshape(leaf.shape)
        else:
            mean = lax.psum_scatter(
                value(leaf).astype(dtype), axis_name, scatter_dimension=axis % leaf.ndim, tiled=True
            )
            mean = mean / lax.axis_size(axis_name) if op == "mean" else mean
        if not is_scaled(leaf):
            mean = mean.astype(leaf.dtype)
        elif axis is None or has_blocks_along(leaf.scale, axis):
            mean = quantize_gradient(mean, _own_scale(leaf.scale, axis, axis_name).shape)
        else:
            [mean] = buckets.on_common_scales([mean], axis_name, leaf.scale.shape)
        new.append(mean)
    return new


def reduced_codes(
    codes: list[ScaledArray], axes: list[int | None], axis_name: str, op: str
) -> list[ScaledArray]:
    """The means or sums of E4M3 `ScaledArray`s with common scales, sent as codes; see `reduced`."""
    devices = lax.axis_size(axis_name)
    rows = [_rows_for_devices(to_bytes(q.data), axis, devices) for q, axis in zip(codes, axes, strict=True)]
    # A sum has a power of two as its scale, because a `ScaledGradient` has no other.
    divisor = devices if op == "mean" else 2 ** (devices - 1).bit_length()
    means = buckets.sums_of_rows(rows, axis_name, divisor)
    parts = [mean for mean, axis in zip(means, axes, strict=True) if axis is None]
    whole = iter(buckets.gathered(parts, axis_name))
    new = []
    for q, axis, mean in zip(codes, axes, means, strict=True):
        if axis is None:
            mean = next(whole).reshape(-1)[: q.size].reshape(q.shape)
        else:
            mean = _shard_of_row(mean, q.shape, axis, devices)
        scale = _own_scale(q.scale, axis, axis_name)
        new.append(ScaledArray(from_bytes(mean, formats.E4M3), scale * divisor if op == "sum" else scale))
    return new


def _rows_for_devices(codes: jax.Array, axis: int | None, devices: int) -> jax.Array:
    """Codes in shape=(devices, n); row i is the shard of device i."""
    if axis is not None:
        return jnp.moveaxis(codes, axis, 0).reshape(devices, -1)
    flat = codes.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)


def _shard_of_row(row: jax.Array, shape: tuple[int, ...], axis: int, devices: int) -> jax.Array:
    """The shard along `axis` of a tensor of `shape`, from its row of `_rows_for_devices`."""
    axis %= len(shape)
    rest = (*shape[:axis], *shape[axis + 1 :])
    return jnp.moveaxis(row.reshape(shape[axis] // devices, *rest), 0, axis)


def _own_scale(scale: jax.Array, axis: int | None, axis_name: str) -> jax.Array:
    """This device's shard of the scales; the whole scale without blocks along `axis`."""
    return own_part(scale, axis, axis_name) if has_blocks_along(scale, axis) else scale


def has_blocks_along(scale: jax.Array, axis: int | None) -> bool:
    """Whether shards along `axis` have different scales."""
    return axis is not None and scale.ndim > 0 and scale.shape[axis] > 1


def merged(variables: Mapping[str, Any], axis_name: str) -> dict[str, Any]:
    """The collections other than "params", merged over the devices. All scaling states must be of the same
    step."""

    def mean(x: Any) -> Any:
        return lax.pmean(x, axis_name) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    merge = {
        SCALING: lambda states: unmarked(lax.pmax(marked(states), axis_name)),
        LOSS_SCALE: lambda state: lax.pmin(state, axis_name),
    }
    means = functools.partial(jax.tree.map, mean)
    return {name: merge.get(name, means)(tree) for name, tree in variables.items() if name != PARAMS}
