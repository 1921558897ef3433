"""The tensors that an Adam step quantizes, their amaxes, and their scales in one array.

A GPU computes the scales of all tensors in a few kernels, instead of several for each tensor.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.optim.step import codecs
from fp8jax.optim.step.arithmetic import L2, AdamScalars, AdamStep, ParamState
from fp8jax.optim.step.codecs import decode, scaled_part
from fp8jax.optim.step.weight_rounding import fits, has_16_bits
from fp8jax.quantization import (
    NO_TAG,
    ScaledArray,
    ScaledGradient,
    amax_of_floats,
    is_scaled,
    scale_of_bits,
)

# Limits on partial amaxes: the largest number of partials per block, and the fewest entries per partial.
_MOST_PARTS, _FEW = 16384, 64

_FLOAT32 = jnp.dtype(jnp.float32)

# The fields of `ParamState` that the step may quantize on scales of their own.
STORED = ("mu", "nu", "param", "master")


def quantized_arrays(state: ParamState) -> list[Any]:
    """The `ScaledArray`s of a state, in the order of their scales; then None if the check for inf and NaN
    needs another amax."""
    found = [scaled_part(getattr(state, name)) for name in STORED]
    is_checked = scaled_part(_last_moment(state)) is not None and found[2] is not None
    found = [stored for stored in found if stored is not None]
    return found if is_checked else [*found, None]


def before_rounding(step: AdamStep, state: ParamState, scalars: AdamScalars, decay: str) -> list[jax.Array]:
    """The new float32 values of the `quantized_arrays`."""
    tensors = (step.mu, step.nu, step.weight, step.weight)
    stored = [(x, getattr(state, name)) for x, name in zip(tensors, STORED, strict=True)]
    found = [codecs.before_rounding(x, old) for x, old in stored if scaled_part(old) is not None]
    if len(found) == len(quantized_arrays(state)):
        return found
    # The amax of a quantized weight finds an update that is not finite.
    moment = jnp.abs(step.mu) if step.nu is None else step.nu
    if is_scaled(state.param):
        return [*found, moment]
    if has_16_bits(state.param):
        return [*found, jnp.where(fits(step.weight, state.param), moment, jnp.inf)]
    if state.direction is not None or scalars.limit is None or _dtypes(state.param) - {_FLOAT32}:
        return [*found, moment + jnp.abs(step.update)]
    # The update is finite if the moment and the limit are. So a GPU does not read the weight; nor float32
    # moments, which are finite if the square of the gradient is.
    if decay != L2 and _dtypes(state.grad, state.mu, state.nu) == {_FLOAT32}:
        moment = jnp.square(decode(state.grad))
    return [*found, moment + jnp.where(scalars.limit < jnp.inf, 0.0, jnp.inf)]


def _dtypes(*stored: Any) -> set[Any]:
    """The dtypes of arrays; None for those of other storages, nothing for None."""
    return {getattr(x, "dtype", None) if isinstance(x, jax.Array) else None for x in stored if x is not None}


def _last_moment(state: ParamState) -> Any:
    """The moment that is not finite if the gradient is not: the second, or Muon's."""
    return state.nu if state.direction is None else state.mu


class Layout(NamedTuple):
    """Where `pack` put one state."""

    treedef: Any
    shapes: tuple[tuple[int, ...] | None, ...]  # of the scales of each array, None for an array without
    first_array: int
    first_scale: int


def pack(states: list[ParamState]) -> tuple[Any, list[Layout]]:
    """The states with all scales in one array, and the layout of each state.

    A GPU would copy hundreds of scalar buffers, which are read and updated in place, one at a time.
    """
    nodes, layouts, count = list[Any](), list[Layout](), 0
    for state in states:
        arrays, treedef = jax.tree.flatten(state, is_leaf=is_scaled)
        shapes = tuple(array.bits.shape if is_scaled(array) else None for array in arrays)
        layouts.append(Layout(treedef, shapes, len(nodes), count))
        nodes += arrays
        count += sum(math.prod(shape) for shape in shapes if shape is not None)
    scaled = list(filter(is_scaled, nodes))
    bits = jnp.concatenate([jnp.zeros(0, jnp.uint32), *(node.bits.reshape(-1) for node in scaled)])
    scales = lax.bitcast_convert_type(bits, jnp.float32)
    # Tags are checked here for all gradients at once.
    of_grads = _repeated([isinstance(node, ScaledGradient) for node in scaled], scaled)
    if of_grads.any():
        factors = [_factor(node) for node in scaled]
        scales = jnp.where(of_grads, scale_of_bits(bits), scales)
        if any(factor is not None for factor in factors):
            ones = [
                jnp.ones(node.bits.size) if x is None else x for x, node in zip(factors, scaled, strict=True)
            ]
            scales = jnp.where(scales == NO_TAG, scales, scales * jnp.concatenate(ones))
    # Without the barrier XLA simplifies the slices back to the scalars.
    scales = lax.optimization_barrier(scales)
    return (scales, [node.data if is_scaled(node) else node for node in nodes]), layouts


def _factor(node: Any) -> Any:
    """The factor of a gradient for each of its scales; None for none."""
    factor = getattr(node, "factor", None)
    return None if factor is None else jnp.broadcast_to(factor, node.bits.shape).reshape(-1)


def _repeated(flags: list[bool], nodes: list[Any]) -> np.ndarray[Any, Any]:
    """A flag for each scale of the nodes."""
    return np.repeat(np.array(flags, bool), [node.bits.size for node in nodes])


def unpack(packed: Any, layout: Layout) -> ParamState:
    """One state again, from the result of `pack`."""
    scales, data = packed
    arrays = data[layout.first_array : layout.first_array + len(layout.shapes)]
    parts = iter(reshaped(scales, layout.first_scale, [s for s in layout.shapes if s is not None]))
    nodes = [
        array if shape is None else ScaledArray(array, next(parts))
        for array, shape in zip(arrays, layout.shapes, strict=True)
    ]
    return jax.tree.unflatten(layout.treedef, nodes)


def reshaped(array: jax.Array, first: int, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """Consecutive parts of `array` from `first` on, in these shapes."""
    ends = [first, *(first + np.cumsum([math.prod(shape) for shape in shapes], dtype=int))]
    parts = [lax.slice(array, (a,), (b,)) for a, b in itertools.pairwise(ends)]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def scale_shape(stored: Any) -> tuple[int, ...]:
    """The shape of a tensor's scales; () for None."""
    return () if stored is None else stored.scale.shape


def scale_size(stored: Any) -> int:
    """The number of a tensor's scales; 1 for None."""
    return math.prod(scale_shape(stored))


def places_of_old(states: list[ParamState]) -> tuple[Any, Any, Any]:
    """Indices of scales in the packed scales.

    Returns:
        The indices of the `quantized_arrays`' scales, 0 for None; those of the gradients' scales; and, for
        each scale of a gradient, the index among the first of an amax that grows with the gradient.
    """
    places, of_grads, checks, seen, count = [], [], [], 0, 0
    for state in states:
        of_node = {}
        for node in filter(is_scaled, jax.tree.leaves(state, is_leaf=is_scaled)):
            of_node[id(node)] = np.arange(seen, seen + node.bits.size)
            seen += node.bits.size
        stored = quantized_arrays(state)
        places += [of_node.get(id(node), np.zeros(1, int)) for node in stored]
        if is_scaled(state.grad):
            sizes = [scale_size(node) for node in stored]
            # The last moment, or the last of all, which stands for it.
            moment = scaled_part(_last_moment(state))
            number = next((i for i, x in enumerate(stored) if x is moment), len(stored) - 1)
            first, size = count + sum(sizes[:number]), state.grad.bits.size
            of_grads.append(of_node[id(state.grad)])
            checks.append(first + np.arange(size) % sizes[number])
        count += sum(map(scale_size, stored))
    first, second, third = (np.concatenate([np.zeros(0, int), *each]) for each in (places, of_grads, checks))
    return first, second, third


def partial_amax(x: jax.Array, blocks: tuple[int, ...]) -> jax.Array:
    """Partial amaxes of each scale block, shape=(blocks, parts). A GPU reduces partials in a second
    kernel, which all tensors share in `maxima_of`."""
    blocks = blocks or (1,) * x.ndim
    inner = [dim // count for dim, count in zip(x.shape, blocks, strict=True)]
    split_axis = next((axis for axis, dim in enumerate(inner) if 1 < dim <= _MOST_PARTS), None)
    if split_axis is None or math.prod(inner) < _FEW * inner[split_axis]:
        return amax_of_floats(x, blocks).reshape(-1, 1)
    parts = tuple(
        dim if axis == split_axis else b for axis, (dim, b) in enumerate(zip(x.shape, blocks, strict=True))
    )
    split = (*blocks[: split_axis + 1], inner[split_axis], *blocks[split_axis + 1 :])
    return jnp.moveaxis(amax_of_floats(x, parts).reshape(split), split_axis + 1, -1).reshape(
        -1, inner[split_axis]
    )


def maxima_of(partials: list[jax.Array]) -> jax.Array:
    """The concatenated row maxima of these arrays, with one reduction per width."""
    groups: dict[int, list[jax.Array]] = {}
    for partial in partials:
        groups.setdefault(partial.shape[1], []).append(partial)
    found = {}
    for width, group in groups.items():
        ends = np.cumsum([len(partial) for partial in group])
        found[width] = iter(jnp.split(jnp.max(jnp.concatenate(group), axis=1), ends))
    return jnp.concatenate(
        [jnp.zeros(0, jnp.float32), *(next(found[partial.shape[1]]) for partial in partials)]
    )
