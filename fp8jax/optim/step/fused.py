"""The fused Adam step of all parameters.

    new, ok = fused_adam(states, scalars, decays)

On a GPU the step is computed twice. The first pass computes the amaxes of all quantized tensors in one array,
and from them all scales. The second pass recomputes the step and writes the FP8 codes. A barrier between the
passes stops XLA from storing the float32 results of the first pass.

On a CPU the step is computed once, and each tensor has its own arrays of amaxes and scales. XLA on CPU
compiles equal kernels once, and slices of one array make kernels unequal (O2, 72 parameters: 3 s to compile,
not 12).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.optim.replace_update import ReplaceUpdate
from fp8jax.optim.step import codecs
from fp8jax.optim.step.arithmetic import AdamScalars, AdamStep, ParamState, adam_step
from fp8jax.optim.step.codecs import decode, scaled_part
from fp8jax.platforms import by_platform, gpu_barrier
from fp8jax.quantization import (
    ScaledArray,
    amax_of_floats,
    format_of,
    is_scaled,
    other_bits,
    random_bits,
    scale_of,
    value,
)


class Written(NamedTuple):
    """The result of one parameter's step, in storage formats."""

    update: Any
    mu: Any
    nu: Any
    master: Any
    remainder: Any


class Rounding(NamedTuple):
    """How the step rounds; see `Recipe.rounding`. The moments' storage says how the second one is rounded."""

    first_moment: str = "nearest"
    weight: str = "nearest"


class Shards(NamedTuple):
    """How tensors are sharded over a mesh axis."""

    axis_name: str
    axes: tuple[int | None, ...]  # the sharded axis of each tensor, None for a replicated one


# Limits on partial amaxes: the largest number of partials per block, and the fewest entries per partial.
_MOST_PARTS, _FEW = 16384, 64


def fused_adam(
    states: list[ParamState],
    scalars: AdamScalars,
    seeds: Any,
    decays: tuple[str, ...],
    rounding: Rounding,
    shards: Shards | None = None,
) -> tuple[list[Written], jax.Array]:
    """The new state of each parameter, and whether the step was taken.

    Args:
        states: the parameters' states.
        scalars: the step's scalars.
        seeds: `leaf_seeds`; None if nothing is rounded stochastically.
        decays: the kind of weight decay of each parameter, see `adam_step`.
        rounding: the recipe's `rounding` of the first moment and of the weight.
        shards: how the tensors are sharded; shards share a scale. None for whole tensors.

    Returns:
        What is written for each parameter, the update of a `ScaledArray` as a `ReplaceUpdate`; and a bool,
        shape (). If any new moment or weight is infinite or NaN, the old state and zero updates.
    """
    if shards is None:
        ways = functools.partial(by_platform, cpu=_by_tensor, default=_all_at_once)
        return ways(states, scalars, seeds, decays=decays, rounding=rounding)
    return _all_at_once(states, scalars, seeds, decays, rounding, shards)


def _by_tensor(
    states: list[ParamState], scalars: AdamScalars, seeds: Any, decays: tuple[str, ...], rounding: Rounding
) -> tuple[list[Written], jax.Array]:
    """The step on a CPU."""
    steps = [_step(state, scalars, decay) for state, decay in zip(states, decays, strict=True)]
    largest = [jnp.max(amax) for _, amaxes, _ in steps for amax in amaxes]
    ok = jnp.all(jnp.stack([jnp.zeros((), jnp.float32), *largest]) < jnp.inf)
    every = zip(states, steps, _each(seeds, states), strict=True)
    return [_write(state, *step, ok, seed, rounding) for state, step, seed in every], ok


@functools.partial(jax.jit, static_argnums=2)  # so that equal tensors are traced once
def _step(state: ParamState, scalars: AdamScalars, decay: str) -> tuple[AdamStep, list[jax.Array], list[Any]]:
    """The step, the amaxes of the `_quantized` tensors, and the absmax of the moments' 8-bit blocks."""
    step = adam_step(state, scalars, decay)
    pairs = zip(_before_rounding(step, state), _quantized(state), strict=True)
    amaxes = [amax_of_floats(x, _scale_shape(stored)) for x, stored in pairs]
    return step, amaxes, _block_maxima(step, state)


@functools.partial(jax.jit, static_argnums=6)
def _write(
    state: ParamState,
    step: AdamStep,
    amaxes: list[jax.Array],
    maxima: list[Any],
    ok: jax.Array,
    seed: Any,
    rounding: Rounding,
) -> Written:
    pairs = [(stored, x) for stored, x in zip(_quantized(state), amaxes, strict=True) if is_scaled(stored)]
    scales = [scale_of(amax, format_of(stored).max, power_of_two=True) for stored, amax in pairs]
    kept = [jnp.where(ok, scale, stored.scale) for scale, (stored, _) in zip(scales, pairs, strict=True)]
    return _second_pass(state, step, scales, kept, maxima, ok, _random_bits(state, seed), rounding)


def _all_at_once(
    states: list[ParamState],
    scalars: AdamScalars,
    seeds: Any,
    decays: tuple[str, ...],
    rounding: Rounding,
    shards: Shards | None = None,
) -> tuple[list[Written], jax.Array]:
    """The step on a GPU, and of shards on any platform: one array of scales, one all-reduce of the amaxes."""
    packed, layout = _packed(states)
    amaxes, maxima = _first_pass(_unpacked(packed, layout), scalars, decays)
    if shards is not None:
        # Not every all-reduce propagates NaN.
        amaxes = lax.pmax(jnp.where(amaxes < jnp.inf, amaxes, jnp.inf), shards.axis_name)
    ok = jnp.all(amaxes < jnp.inf)
    nodes = [stored for state in states for stored in _quantized(state)]
    limits = [
        np.full(_scale_size(stored), 1.0 if stored is None else format_of(stored).max) for stored in nodes
    ]
    new = scale_of(amaxes, np.concatenate([[], *limits]).astype(np.float32), power_of_two=True)
    old = packed[0][_places_of_old(states)] if packed[0].size else jnp.ones_like(new)
    (scales, data), shared, maxima = gpu_barrier((packed, (scalars, seeds, new, old, ok), maxima))
    sizes = [sum(map(_scale_size, _quantized(state))) for state in states]
    places = [None] * len(states) if shards is None else [_shard(axis, shards) for axis in shards.axes]
    written = []
    for i in range(len(states)):
        if states[i].remainder is not None:
            # With shared scalars XLA fuses outputs of different tensors, and leaves those of one apart.
            scales, shared = gpu_barrier((scales, shared))
        scalars, seeds, new, old, ok = shared
        state, decay = _unpacked((scales, data), layout)[i], decays[i]
        random = _random_bits(state, None if seeds is None else seeds[i], places[i])
        fresh, kept = (_shaped(state, _parts(x, sizes)[i]) for x in (new, jnp.where(ok, new, old)))
        step, weight = adam_step(state, scalars, decay), None
        if state.remainder is not None:
            # XLA would store what the weight and its remainder have in common. It computes the step again
            # with scalars that it cannot tell to be the same.
            weight = adam_step(state, gpu_barrier(scalars), decay).weight
        written.append(_second_pass(state, step, fresh, kept, maxima[i], ok, random, rounding, weight))
    return written, ok


def as_written(states: list[ParamState], scalars: AdamScalars, seeds: Any) -> tuple[list[Written], jax.Array]:
    """A result with the shapes of `fused_adam`'s and the shardings of the states."""
    del scalars, seeds
    new = []
    for state in states:
        moves = state.grad if state.param is None else state.param
        update = ReplaceUpdate.by(moves) if is_scaled(state.param) else value(moves)
        new.append(Written(update, state.mu, state.nu, state.master, state.remainder))
    return new, jnp.array(True)


def _first_pass(
    states: list[ParamState], scalars: AdamScalars, decays: tuple[str, ...]
) -> tuple[jax.Array, list[Any]]:
    """The concatenated amaxes of each state's `_quantized` tensors, and the absmax of 8-bit blocks."""
    partials, maxima = [], []
    for state, decay in zip(states, decays, strict=True):
        step = adam_step(state, scalars, decay)
        for tensor, stored in zip(_before_rounding(step, state), _quantized(state), strict=True):
            partials.append(_partial_amax(tensor, _scale_shape(stored)))
        maxima.append(_block_maxima(step, state))
    return _maxima(partials), maxima


def _block_maxima(step: AdamStep, state: ParamState) -> list[Any]:
    """The absmax of the 8-bit blocks of both moments; None for moments in other formats."""
    return [codecs.block_maxima(step.mu, state.mu), codecs.block_maxima(step.nu, state.nu)]


def _second_pass(
    state: ParamState,
    step: AdamStep,
    scales: list[jax.Array],
    kept_scales: list[jax.Array],
    maxima: list[Any],
    ok: jax.Array,
    random: Any,
    rounding: Rounding,
    weight_again: Any = None,
) -> Written:
    """Encodes the new state of one parameter.

    Args:
        state: the old state.
        step: the result of `adam_step`.
        scales: the new scales of the `_quantized` tensors.
        kept_scales: the scales to store: `scales` if `ok`, else the old scales.
        maxima: the absmax of the moments' 8-bit blocks.
        ok: whether the step is taken.
        random: see `_random_bits`.
        rounding: how the first moment and the weight are rounded.
        weight_again: the weight of `step`, computed again for the remainder; None takes that of `step`.
    """
    names = [name for name in _STORED if scaled_part(getattr(state, name)) is not None]
    new, kept = (dict(zip(names, all_of, strict=False)) for all_of in (scales, kept_scales))
    of_mu = random[0] if rounding.first_moment == "stochastic" else None
    of_weight = random[1] if rounding.weight == "stochastic" else None

    def stored(name: str, encoded: Any) -> Any:
        chosen = codecs.select(ok, encoded, getattr(state, name))
        return codecs.with_scale(chosen, kept[name]) if name in names else chosen

    mu = stored("mu", codecs.encode(step.mu, state.mu, new.get("mu", maxima[0]), of_mu))
    of_nu = random[2] if isinstance(state.nu, codecs.Root) else None
    nu = stored("nu", codecs.encode(step.nu, state.nu, new.get("nu", maxima[1]), of_nu))
    if not is_scaled(state.param):
        # -0, because XLA would merge 0 with the zeros that a scan's gradients start from, and store them.
        return Written(jnp.where(ok, step.update, -0.0), mu, nu, None, None)
    name, remainder = "param" if state.master is None else "master", state.remainder
    if remainder is None:
        weight = codecs.encode(step.weight, getattr(state, name), new.get(name), of_weight)
    else:
        weight = codecs.encode(step.weight, getattr(state, name), new[name])
        exact = step.weight if weight_again is None else weight_again
        rest = codecs.encode_remainder(exact, getattr(state, name), new[name], random[1])
        remainder = codecs.select(ok, rest, remainder)
    if state.master is None:
        return Written(ReplaceUpdate.by(stored("param", weight)), mu, nu, None, remainder)
    # From the stored master weight, so that a checkpoint of master weights gives the same weight.
    param = codecs.encode(decode(weight), state.param, new["param"])
    return Written(ReplaceUpdate.by(stored("param", param)), mu, nu, stored("master", weight), remainder)


def _shard(axis: int | None, shards: Shards) -> tuple[int, jax.Array, int] | None:
    """This device's shard for `random_bits`; None for a replicated tensor."""
    if axis is None:
        return None
    return axis, lax.axis_index(shards.axis_name), lax.axis_size(shards.axis_name)


def _each(seeds: Any, states: list[ParamState]) -> list[Any]:
    return [None] * len(states) if seeds is None else [seeds[i] for i in range(len(states))]


def _random_bits(state: ParamState, seed: Any, shard: Any = None) -> Any:
    """Random bits for the first moment, the weight and the second moment; Nones without a seed."""
    if seed is None:
        return None, None, None
    bits = random_bits(seed, state.grad.shape, shard)
    return bits, *other_bits(bits)


# The fields of `ParamState` that the step may quantize on scales of their own.
_STORED = ("mu", "nu", "param", "master")


def _quantized(state: ParamState) -> list[Any]:
    """The `ScaledArray`s of a state, in the order of their scales; then None if the check for inf and NaN
    needs another amax."""
    found = [scaled_part(getattr(state, name)) for name in _STORED]
    is_checked = found[1] is not None and found[2] is not None  # the second moment and the weight
    found = [stored for stored in found if stored is not None]
    return found if is_checked else [*found, None]


def _before_rounding(step: AdamStep, state: ParamState) -> list[jax.Array]:
    """The new float32 values of the `_quantized` tensors."""
    tensors = (step.mu, step.nu, step.weight, step.weight)
    stored = [(x, getattr(state, name)) for x, name in zip(tensors, _STORED, strict=True)]
    found = [codecs.before_rounding(x, kept) for x, kept in stored if scaled_part(kept) is not None]
    return found if len(found) == len(_quantized(state)) else [*found, step.nu + jnp.abs(step.update)]


# Scales ##########################################################################################


def _packed(states: list[ParamState]) -> tuple[Any, Any]:
    """The states with all scales in one array, and the layout that `_unpacked` needs.

    A GPU would copy hundreds of scalar buffers, which are read and updated in place, one at a time.
    """
    nodes, treedef = jax.tree.flatten(states, is_leaf=is_scaled)
    shapes = tuple(node.scale.shape if is_scaled(node) else None for node in nodes)
    scales = [node.scale.reshape(-1) for node in nodes if is_scaled(node)]
    # Without the barrier XLA simplifies the slices back to the scalars.
    packed = lax.optimization_barrier(jnp.concatenate([jnp.zeros(0, jnp.float32), *scales]))
    return (packed, [node.data if is_scaled(node) else node for node in nodes]), (treedef, shapes)


def _unpacked(packed: Any, layout: Any) -> list[ParamState]:
    (scales, data), (treedef, shapes) = packed, layout
    parts = iter(_parts(scales, [math.prod(shape) for shape in shapes if shape is not None]))
    nodes = [
        node if shape is None else ScaledArray(node, next(parts).reshape(shape))
        for node, shape in zip(data, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, nodes)


def _parts(array: jax.Array, sizes: list[int]) -> list[jax.Array]:
    """`array` split into consecutive parts of these sizes."""
    return jnp.split(array, np.cumsum(sizes, dtype=int)[:-1]) if sizes else []


def _scale_shape(stored: Any) -> tuple[int, ...]:
    return () if stored is None else stored.scale.shape


def _scale_size(stored: Any) -> int:
    return math.prod(_scale_shape(stored))


def _shaped(state: ParamState, scales: jax.Array) -> list[jax.Array]:
    """The scales of one state, reshaped to the shapes in the state."""
    shapes = [*map(_scale_shape, _quantized(state))]
    return [x.reshape(s) for x, s in zip(_parts(scales, [*map(math.prod, shapes)]), shapes, strict=True)]


def _places_of_old(states: list[ParamState]) -> np.ndarray[Any, Any]:
    """Indices of the scales of the `_quantized` tensors in the packed scales; 0 for None."""
    places, seen = [], 0
    for state in states:
        of_node = {}
        for node in filter(is_scaled, jax.tree.leaves(state, is_leaf=is_scaled)):
            of_node[id(node)] = np.arange(seen, seen + node.scale.size)
            seen += node.scale.size
        places += [of_node.get(id(stored), np.zeros(1, int)) for stored in _quantized(state)]
    return np.concatenate([np.zeros(0, int), *places])


def _partial_amax(x: jax.Array, blocks: tuple[int, ...]) -> jax.Array:
    """Partial amaxes of each scale block, shape=(blocks, parts). A GPU reduces partials in a second
    kernel, which all tensors share in `_maxima`."""
    blocks = blocks or (1,) * x.ndim
    inner = [dim // count for dim, count in zip(x.shape, blocks, strict=True)]
    kept = next((axis for axis, dim in enumerate(inner) if 1 < dim <= _MOST_PARTS), None)
    if kept is None or math.prod(inner) < _FEW * inner[kept]:
        return amax_of_floats(x, blocks).reshape(-1, 1)
    parts = tuple(
        dim if axis == kept else b for axis, (dim, b) in enumerate(zip(x.shape, blocks, strict=True))
    )
    split = (*blocks[: kept + 1], inner[kept], *blocks[kept + 1 :])
    return jnp.moveaxis(amax_of_floats(x, parts).reshape(split), kept + 1, -1).reshape(-1, inner[kept])


def _maxima(partials: list[jax.Array]) -> jax.Array:
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
