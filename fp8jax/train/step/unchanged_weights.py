"""The share of the weights that a step leaves unchanged because it is smaller than their rounding.

    sample = sampler_of(network, recipe, like, placement)   # None if no weight is rounded to nearest
    before = sample(state)
    state, _ = trainer.step(state, batch)
    unchanged_share(before, sample(state))                  # 0.97: take the recipe fp8

A weight that is rounded to nearest ignores an update below half of its last bit. The share is estimated from
evenly spaced entries of each tensor, by a program of its own, so that a step costs what it costs without.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, PyTree

from fp8jax import formats
from fp8jax.inspect.numerics.of_step import stored_params
from fp8jax.quantization import format_of, is_scaled, value
from fp8jax.recipe import Recipe
from fp8jax.train.step.network import RunState
from fp8jax.train.step.placement import Placement
from fp8jax.variables import PARAMS

# About so many entries of a tensor: the standard error of its share is at most 0.5 / sqrt(4096), 0.8%.
ENTRIES = 4096


class Sample(NamedTuple):
    """Entries of the weights that are rounded to nearest."""

    value: Float32[Array, " entries"]
    moves: Bool[Array, " entries"]  # whether its first moment, and so its last update, was not zero
    weights: Float32[Array, " entries"]  # number of weights that the entry stands for


def sampler_of(
    network: Any, recipe: Recipe, like: RunState, placement: Placement
) -> Callable[[RunState], Sample] | None:
    """The compiled function from a state to a `Sample`.

    It is None if no weight is rounded to nearest, or if moments and masters are in the host's memory.

    Args:
        network: see `network_of`.
        recipe: its `rounding` says how weights are rounded.
        like: shapes, dtypes and shardings of a state.
        placement: the result is on all of its devices.
    """
    stored = _stored_weights(network.collections(like.variables)[PARAMS], like.opt_state)
    memory = placement.mesh.local_devices[0].default_memory().kind
    is_on_host = any(x.sharding.memory_kind not in (None, memory) for x in jax.tree.leaves(stored))
    if recipe.rounding[1] != "nearest" or not stored or is_on_host:
        return None
    strides = [_strides(weight, moment) for weight, moment in stored]

    def sample(variables: PyTree, opt_state: PyTree) -> Sample:
        found = []
        stored = _stored_weights(network.collections(variables)[PARAMS], opt_state)
        for (weight, moment), steps in zip(stored, strides, strict=True):
            entries = _entries(value(weight), steps)
            moves = jnp.full(entries.shape, True) if moment is None else _entries(moment, steps) != 0
            each = jnp.full(entries.shape, weight.size / entries.size, jnp.float32)
            found.append(Sample(entries, moves, each))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)

    jitted = jax.jit(sample, out_shardings=placement.replicated)
    compiled = placement.one_at_a_time(jitted.lower(like.variables, like.opt_state).compile())
    return lambda state: compiled(state.variables, state.opt_state)


def unchanged_share(before: Sample, after: Sample) -> float | None:
    """The share of the weights that a step left unchanged, of those that it updates; None without such."""
    before, after = jax.device_get((before, after))
    weights = np.where(after.moves, after.weights, 0.0)
    if not weights.sum():
        return None
    return float(weights[before.value == after.value].sum() / weights.sum())


def _stored_weights(params: PyTree, opt_state: PyTree) -> list[tuple[Any, Any]]:
    """Each FP16 weight, or the FP16 master weight of an FP8 weight, and its first moment if Adam has one."""
    pairs = [(param.weight, param.first) for param in stored_params(params, opt_state)]
    return [pair for pair in pairs if is_scaled(pair[0]) and format_of(pair[0]) == formats.FP16]


def _strides(weight: Any, moment: Any) -> tuple[int, ...]:
    """The distances between entries along each axis, for about `ENTRIES` of them.

    Only the last two axes are strided: those before them are layers and experts. Axes that are split over
    devices stay whole, so that a device takes entries of its own part.
    """
    shape, arrays = weight.shape, [x for x in jax.tree.leaves((weight, moment)) if x.shape == weight.shape]
    parts = [x.sharding.shard_shape(shape) for x in arrays]
    whole = [axis for axis, dim in enumerate(shape) if all(part[axis] == dim for part in parts)]
    strided = [axis for axis in whole if axis >= len(shape) - 2]
    # Odd, so that entries are not always the first of a head.
    step = int((math.prod(shape) / ENTRIES) ** (1 / max(len(strided), 1))) | 1
    return tuple(min(step, dim) if axis in strided else 1 for axis, dim in enumerate(shape))


def _entries(x: Any, strides: tuple[int, ...]) -> jax.Array:
    x = jnp.asarray(x)
    return lax.slice(x, (0,) * x.ndim, x.shape, strides).reshape(-1)
