"""Hugging Face folders, plain or FP8, as the variables of a transformed model.

    like = model.init(key, tokens)      # formats and shardings; shapes in the place of parameters are enough
    variables = load("Llama-FP8", like=like, mapping=LLAMA)

One tensor at a time is read, put into the format of its parameter, and sent to the parameter's devices.
"""

import functools
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fp8jax.checkpoints.folder import DTYPES, read
from fp8jax.checkpoints.maps import by_name
from fp8jax.checkpoints.names import NameMap, Place
from fp8jax.checkpoints.stored import Stored, overflow, scale_blocks, tensors
from fp8jax.checkpoints.tree import Key, named
from fp8jax.formats import BF16, E8M0, FP16
from fp8jax.quantization import MAX_SCALE, MIN_SCALE, ScaledArray, amax, is_scaled, quantize_like
from fp8jax.variables import FROZEN, PARAMS

_SHOWN = 3  # names of one kind in an error


def load(folder: str | os.PathLike[str], *, like: PyTree, mapping: NameMap | str) -> PyTree:
    """The variables of a transformed model, with the weights of a Hugging Face folder.

    E4M3 codes stay as they are, bit for bit, where the parameter is E4M3 with scales that cover the same
    numbers. Other weights are dequantized, and quantized once to the parameter's format.

    Args:
        folder: `config.json`, and safetensors files with plain weights or with a format of `FORMATS`.
        like: variables from `model.init`, or with shapes (`jax.ShapeDtypeStruct`) in the place of parameters.
            It gives shapes, formats and shardings; what is no parameter stays. For NNX
            `nnx.state(model, nnx.Param)`.
        mapping: from torch's names, or a name as in `save`. `Rename` with flax=None leaves a tensor out.

    Returns:
        A tree like `like`.

    Raises:
        ValueError: an argument is of another kind; the folder is broken; its quantization is unknown; a
            tensor fits no parameter, has another shape, or numbers that overflow in the parameter's dtype; a
            parameter gets no tensor.
    """
    mapping, arrays = by_name(mapping), jax.tree.leaves(like)
    if jax.tree_util.all_leaves([like]) or not any(hasattr(x, "shape") for x in arrays):
        got = type(like).__name__ if arrays else repr(like)
        raise ValueError(f"`like`: expected a tree of arrays, as `model.init` gives; got {got}.")
    stored = read(pathlib.Path(folder))
    blocks = scale_blocks(stored.config)
    tree = named(like)
    has_frozen = any(key[0] == FROZEN for key in tree.leaves)
    own: Key = (FROZEN if has_frozen else PARAMS,) if tree.has_collections else ()
    parts: dict[Key, dict[tuple[int, ...], tuple[Stored, Place]]] = {}
    unknown = []
    entries = {name: entry for name, entry in stored.entries.items() if not _is_left_out(name, mapping)}
    for name, entry in entries.items():
        if entry.dtype_name not in DTYPES:
            raise ValueError(
                f"`folder`: expected a dtype of {', '.join(DTYPES)} for {name}; got {entry.dtype_name}, "
                "which training cannot start from. `Rename` with flax=None leaves a tensor out."
            )
    for tensor in tensors(entries, blocks):
        place = mapping.place(tensor.name)
        if place is not None and (*own, *place.path) in tree.leaves:
            of_leaf = parts.setdefault((*own, *place.path), {})
            if place.layer in of_leaf:
                twice = f"{of_leaf[place.layer][0].name} and {tensor.name}"
                raise ValueError(f"`folder`: expected one tensor for {'/'.join(place.path)}; got {twice}.")
            of_leaf[place.layer] = (tensor, place)
        else:
            unknown.append(tensor.name)
    targets = [key for key in tree.leaves if key[: len(own)] == own]
    if others := [
        k for k, x in tree.leaves.items() if k not in targets and isinstance(x, jax.ShapeDtypeStruct)
    ]:
        raise ValueError(
            f"`like`: expected shapes in the place of parameters only; got one for {'/'.join(others[0])}. "
            "Take the other collections from `model.init`, compiled without parameters as its output."
        )
    _check("tensors that `mapping` leads to a parameter of `like`", unknown)
    _check("a tensor for each parameter of `like`", ["/".join(k) for k in targets if k not in parts])
    for key, found in parts.items():
        _check_shapes(key, found, tree.leaves[key])
    # What a large tensor needs beside its array is gone before the others are there.
    targets.sort(key=lambda key: -tree.leaves[key].size)
    return tree.rebuilt({key: _leaf(parts[key], tree.leaves[key]) for key in targets})


def _is_left_out(name: str, mapping: NameMap) -> bool:
    """Whether the mapping has a rename for the tensor, to nothing."""
    return mapping.place(name) is None and mapping.rename_of(name) is not None


def _check(expected: str, wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"`folder`: expected {expected}; got none for {', '.join(wrong[:_SHOWN])}{more}. Check `mapping` "
            "and the model's size; `Rename` with flax=None leaves a tensor out."
        )


def _check_shapes(key: Key, found: Mapping[tuple[int, ...], tuple[Stored, Place]], like: Any) -> None:
    """Raises ValueError if layers are missing, or a tensor has another shape than its part of `like`."""
    depth = len(next(iter(found)))
    for index in np.ndindex(*like.shape[:depth]):
        if index not in found:
            raise ValueError(f"`folder`: expected layer {list(index)} of {'/'.join(key)}; got none.")
    for index, (tensor, place) in found.items():
        try:
            shape = place.arrange(np.broadcast_to(np.uint8(0), tensor.shape)).shape
        except ValueError:
            shape = None
        is_inside = all(i < n for i, n in zip(index, like.shape, strict=False))
        if shape != tuple(like.shape[depth:]) or not is_inside or len(index) != depth:
            remedy, got = "Build the model with the sizes of config.json.", shape or tensor.shape
            if shape is None:
                remedy += (
                    f" Check shape={place.shape} of its `Rename`: -1 is a dimension that torch has, too."
                )
            if shape != tuple(like.shape[depth:]) and sorted(got) == sorted(like.shape[depth:]):
                remedy = "Check `axes` of its `Rename`, which give this order."
            raise ValueError(
                f"`folder`: expected shape {list(like.shape)} for {'/'.join(key)}; got {list(got)}"
                f"{f' at layer {list(index)}' if index else ''} in {tensor.name}. {remedy}"
            )


def _leaf(found: Mapping[tuple[int, ...], tuple[Stored, Place]], like: Any) -> Any:
    """A parameter from the tensors of its layers, on the devices of `like`."""
    arrays, treedef = jax.tree.flatten(like)
    depth = len(next(iter(found)))

    def shapes(skipped: int) -> Any:
        return treedef.unflatten([jax.ShapeDtypeStruct(x.shape[skipped:], x.dtype) for x in arrays])

    if not depth:
        ((tensor, place),) = found.values()
        new = _fitted(tensor, place, like)
    elif all(x.shape[:depth] == like.shape[:depth] for x in arrays):
        new = [np.empty(x.shape, x.dtype) for x in arrays]
        for index, (tensor, place) in found.items():
            for whole, part in zip(new, _fitted(tensor, place, shapes(depth)), strict=True):
                _copy(part, whole[*index, ...])  # a view, of a scalar too
    else:  # one scale for all layers
        values = np.empty(like.shape, np.float32)
        for index, (tensor, place) in found.items():
            _copy(tensor.value(place), values[index])
        new = _quantized(values, shapes(0), f"the layers of {'/'.join(next(iter(found.values()))[1].path)}")
    return treedef.unflatten(map(_put, new, arrays))


def _copy(x: Any, to: np.ndarray) -> None:
    """Copies by JAX on the CPU, which is five times as fast as NumPy for a transposed matrix."""
    np.copyto(to, _on_host(x), casting="unsafe")


def _on_host(x: Any) -> jax.Array:
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS=cuda
        host = None
    return jax.device_put(x, host)


def _put(x: Any, like: Any) -> jax.Array:
    """An array on the devices of `like`, converted there to its dtype."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        # A queue of conversions would hold all that they read.
        return jax.block_until_ready(jax.device_put(x, sharding).astype(like.dtype))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__).astype(like.dtype)


def _fitted(tensor: Stored, place: Place, like: Any) -> list[Any]:
    """A tensor as an array, which may have another dtype than `like`, or as leaves of a `ScaledArray`."""
    if not is_scaled(like):
        x = tensor.value(place)
        is_16_bits = like.dtype in (FP16.dtype, BF16.dtype) and x.dtype != like.dtype
        if is_16_bits and _overflows(_on_host(x), like.dtype):
            raise overflow(tensor.name, like.dtype)
        return [x]
    if (codes := _as_stored(tensor, place, like)) is not None:
        return jax.tree.leaves(codes)
    return _quantized(tensor.value(place), like, tensor.name)


@functools.partial(jax.jit, static_argnames="dtype")
def _overflows(x: Any, dtype: Any) -> Any:
    """Whether a finite number would be an infinity in `dtype`."""
    x, limits = x.astype(jnp.float32), jnp.finfo(dtype)
    # XLA may leave out a cast there and back, but not this.
    rounded = jax.lax.reduce_precision(x, limits.nexp, limits.nmant)
    return jnp.any(jnp.isinf(rounded) & jnp.isfinite(x))


def _quantized(x: Any, like: ScaledArray, name: str) -> list[Any]:
    """The leaves of `quantize_like`; raises ValueError for an infinity, which a code cannot hold, or NaN."""
    arrays, treedef = jax.tree.flatten(like)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    new, is_finite = _quantized_by_xla(x, shapes, treedef)
    if not is_finite:
        raise ValueError(
            f"`folder`: expected finite numbers in {name}, which is quantized; got an infinity or NaN."
        )
    return new


@functools.partial(jax.jit, static_argnames=("shapes", "treedef"))
def _quantized_by_xla(x: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], treedef: Any) -> Any:
    like = treedef.unflatten(shapes)
    return jax.tree.leaves(quantize_like(x, like)), jnp.isfinite(amax(x, like.bits.shape)).all()


def _as_stored(tensor: Stored, place: Place, like: ScaledArray) -> ScaledArray | None:
    """A tensor's codes and scales as they are; None if `like` has another format or blocks."""
    if not tensor.scales or tensor.codes.dtype != like.data.dtype or is_scaled(like.scale):
        return None
    grid, counts = tensor.grid(), like.bits.shape
    if math.prod(counts) == 1:
        scale = grid[0, 0].reshape(counts) if (grid == grid[0, 0]).all() else None
    elif place.shape is None:
        order = place.axes or (0, 1)
        scale = _regrid(place.arrange(grid), [tensor.block[axis] for axis in order], like.shape, counts)
    else:
        scale = None
    if scale is None:
        return None
    new = scale.astype(like.scale.dtype)
    is_legal = new.dtype == E8M0.dtype or ((scale >= MIN_SCALE) & (scale <= MAX_SCALE)).all()
    if not is_legal or (new.astype(np.float32) != scale).any():
        return None
    return ScaledArray(place.arrange(tensor.codes.array()), new)


def _regrid(grid: Any, sizes: Sequence[int], shape: Sequence[int], counts: Sequence[int]) -> Any:
    """The scales of other blocks, `counts` along each axis; None if they are not the same numbers."""
    for axis, (dim, size, count) in enumerate(zip(shape, sizes, counts, strict=True)):
        theirs, ours = size or dim, dim // count
        if theirs % ours and ours % theirs:
            return None
        taken = np.take(grid, np.arange(count) * ours // theirs, axis)
        if (np.take(taken, np.arange(grid.shape[axis]) * theirs // ours, axis) != grid).any():
            return None
        grid = taken
    return grid
