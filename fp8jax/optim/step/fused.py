"""The fused Adam step of all parameters.

    new, ok = fused_adam(states, scalars, decays)

On a GPU the step is computed twice. The first pass computes the amaxes of all quantized tensors in one array,
and from them all scales. The second pass recomputes the step and writes the FP8 codes. A barrier between the
passes stops XLA from storing the float32 results of the first pass. Other barriers decide which tensors share
a kernel, and that nothing is stored within a pass.

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

from fp8jax.optim.step import codecs
from fp8jax.optim.step.arithmetic import AdamScalars, AdamStep, ParamState, adam_step
from fp8jax.optim.step.codecs import scaled_part
from fp8jax.optim.step.encode_state import Rounding, Written, encode_state
from fp8jax.optim.step.scales import (
    Layout,
    before_rounding,
    maxima_of,
    pack,
    partial_amax,
    places_of_old,
    quantized_arrays,
    reshaped,
    scale_shape,
    scale_size,
    unpack,
)
from fp8jax.optim.step.skipped_step import fault_of, faults_by_tensor
from fp8jax.optim.storage import Storage
from fp8jax.platforms import by_platform, gpu_barrier
from fp8jax.quantization import (
    amax_of_floats,
    format_of,
    is_scaled,
    other_bits,
    plain,
    random_bits,
    scale_of,
)

# Tensors of so many entries are updated two in a kernel. XLA would take ten, with 255 registers, and an H200
# then moves 2.3 TB/s instead of 3.4.
_LARGE, _TOGETHER = 2**22, 2


class StateSharding(NamedTuple):
    """How tensors are sharded over a mesh axis."""

    axis_name: str
    axes: tuple[int | None, ...]  # the sharded axis of each tensor, None for a replicated one


def fused_adam(
    states: list[ParamState],
    scalars: AdamScalars,
    seeds: Any,
    decays: tuple[str, ...],
    rounding: Rounding,
    shards: StateSharding | None = None,
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
        shape (). If any new moment or weight is infinite or NaN, the old state and zero updates; if a
        gradient that lost its tag is the cause, NaN scales for the parameters (see `optim.guard`).
    """
    if shards is None:
        ways = functools.partial(by_platform, cpu=_by_tensor, default=_all_at_once)
        return ways(states, scalars, seeds, decays=decays, rounding=rounding)
    return _all_at_once(states, scalars, seeds, decays, rounding, shards)


def _by_tensor(
    states: list[ParamState], scalars: AdamScalars, seeds: Any, decays: tuple[str, ...], rounding: Rounding
) -> tuple[list[Written], jax.Array]:
    """The step on a CPU."""
    states = [state._replace(grad=plain(state.grad)) for state in states]
    steps = [_step(state, scalars, decay) for state, decay in zip(states, decays, strict=True)]
    ok, is_lost = faults_by_tensor([state.grad for state in states], [amaxes for _, amaxes, _ in steps])
    each = [_one_of(seeds, i) for i in range(len(states))]
    every = zip(states, steps, each, strict=True)
    return [_write(state, *step, ok, is_lost, seed, rounding) for state, step, seed in every], ok


def _one_of(seeds: jax.Array | None, i: int) -> jax.Array | None:
    """The seed of a state by a reduction: a slice would be part of a kernel and make it unequal to others."""
    return None if seeds is None else jnp.max(jnp.where(np.arange(len(seeds)) == i, seeds, 0))


@functools.partial(jax.jit, static_argnums=2)  # so that equal tensors are traced once
def _step(state: ParamState, scalars: AdamScalars, decay: str) -> tuple[AdamStep, list[jax.Array], list[Any]]:
    """The step, the amaxes of the `quantized_arrays`, and the absmax of the moments' 8-bit blocks."""
    step = adam_step(state, scalars, decay)
    pairs = zip(before_rounding(step, state, scalars, decay), quantized_arrays(state), strict=True)
    amaxes = [amax_of_floats(x, scale_shape(stored)) for x, stored in pairs]
    return step, amaxes, _block_maxima(step, state)


@functools.partial(jax.jit, static_argnums=7)
def _write(
    state: ParamState,
    step: AdamStep,
    amaxes: list[jax.Array],
    maxima: list[Any],
    ok: jax.Array,
    is_lost: Any,
    seed: Any,
    rounding: Rounding,
) -> Written:
    pairs = [
        (stored, x) for stored, x in zip(quantized_arrays(state), amaxes, strict=True) if is_scaled(stored)
    ]
    scales = [scale_of(amax, format_of(stored).max, power_of_two=True) for stored, amax in pairs]
    to_store = [jnp.where(ok, scale, stored.scale) for scale, (stored, _) in zip(scales, pairs, strict=True)]
    random = _random_bits(state, seed)
    return encode_state(state, step, scales, to_store, maxima, ok, is_lost, random, rounding)


def _all_at_once(
    states: list[ParamState],
    scalars: AdamScalars,
    seeds: Any,
    decays: tuple[str, ...],
    rounding: Rounding,
    shards: StateSharding | None = None,
) -> tuple[list[Written], jax.Array]:
    """The step on a GPU, and of shards on any platform: one array of scales, one all-reduce of the amaxes."""
    packed, layouts = pack(states)
    amaxes, maxima = _first_pass(packed, layouts, scalars, decays)
    if shards is not None:
        # Not every all-reduce propagates NaN.
        amaxes = lax.pmax(jnp.where(amaxes < jnp.inf, amaxes, jnp.inf), shards.axis_name)
    places, of_grads, checks = places_of_old(states)
    fault = fault_of(amaxes, packed[0], of_grads, checks)
    nodes = [stored for state in states for stored in quantized_arrays(state)]
    limits = [
        np.full(scale_size(stored), 1.0 if stored is None else format_of(stored).max) for stored in nodes
    ]
    new = scale_of(amaxes, np.concatenate([[], *limits]).astype(np.float32), power_of_two=True)
    old = packed[0][places] if packed[0].size else jnp.ones_like(new)
    (scales, data), shared, maxima = gpu_barrier((packed, (scalars, seeds, new, old, fault), maxima))
    shapes = [[*map(scale_shape, quantized_arrays(state))] for state in states]
    firsts = np.cumsum([0, *(sum(map(math.prod, each)) for each in shapes)], dtype=int)
    places = [None] * len(states) if shards is None else [_shard(axis, shards) for axis in shards.axes]
    are_large = [_is_large(state) for state in states]
    written = []
    for i in range(len(states)):
        if states[i].remainder is not None or (are_large[i] and sum(are_large[:i]) % _TOGETHER == 0):
            # With shared scalars XLA fuses outputs of different tensors, and leaves those of one apart.
            scales, shared = gpu_barrier((scales, shared))
        scalars, seeds, new, old, fault = shared
        ok, is_lost = fault == 0, fault == 2 if len(of_grads) else None
        state, decay = unpack((scales, data), layouts[i]), decays[i]
        random = _random_bits(state, None if seeds is None else seeds[i], places[i])
        fresh, to_store = (reshaped(x, firsts[i], shapes[i]) for x in (new, jnp.where(ok, new, old)))
        step, weight = adam_step(state, scalars, decay), None
        if state.remainder is not None and is_scaled(state.param):
            # XLA would store what the weight and its remainder have in common. It computes the step again
            # with scalars that it cannot tell to be the same.
            weight = adam_step(state, gpu_barrier(scalars), decay).weight
        written.append(
            encode_state(state, step, fresh, to_store, maxima[i], ok, is_lost, random, rounding, weight)
        )
    return written, fault == 0


def _is_large(state: ParamState) -> bool:
    """Whether a state has many quantized entries."""
    return any(map(is_scaled, quantized_arrays(state))) and math.prod(state.grad.shape) >= _LARGE


def _first_pass(
    packed: Any, layouts: list[Layout], scalars: AdamScalars, decays: tuple[str, ...]
) -> tuple[jax.Array, list[Any]]:
    """The concatenated amaxes of each state's `quantized_arrays`, and the absmax of 8-bit blocks."""
    (scales, data), partials, maxima = packed, [], []
    # Depending on the GPU and the sizes, XLA stores what these amaxes share. Given scalars that it cannot
    # tell to be the same, it computes that again.
    of_moments = gpu_barrier(scalars)
    of_blocks = gpu_barrier(of_moments)
    for layout, decay in zip(layouts, decays, strict=True):
        state = unpack(packed, layout)
        step = adam_step(state, scalars, decay)
        moments = adam_step(state, of_moments, decay)
        step = step._replace(mu=moments.mu, nu=moments.nu)
        pairs = zip(before_rounding(step, state, scalars, decay), quantized_arrays(state), strict=True)
        partials += [partial_amax(tensor, scale_shape(stored)) for tensor, stored in pairs]
        if not any(isinstance(x, Storage) and scaled_part(x) is None for x in (state.mu, state.nu)):
            maxima.append([None, None])
            continue
        if _is_large(state):
            # A kernel for the blocks of several tensors reads an entry at a time.
            scales, of_blocks = gpu_barrier((scales, of_blocks))
            state = unpack((scales, data), layout)
        maxima.append(_block_maxima(adam_step(state, of_blocks, decay), state))
    return maxima_of(partials), maxima


def _block_maxima(step: AdamStep, state: ParamState) -> list[Any]:
    """The absmax of the 8-bit blocks of both moments; None for moments in other formats."""
    return [codecs.maxima_of(step.mu, state.mu), codecs.maxima_of(step.nu, state.nu)]


def _shard(axis: int | None, shards: StateSharding) -> tuple[int, jax.Array, int] | None:
    """This device's shard for `random_bits`; None for a replicated tensor."""
    if axis is None:
        return None
    return axis, lax.axis_index(shards.axis_name), lax.axis_size(shards.axis_name)


def _random_bits(state: ParamState, seed: Any, shard: Any = None) -> Any:
    """Random bits for the first moment, the weight and the second moment; Nones without a seed."""
    if seed is None:
        return None, None, None
    bits = random_bits(seed, state.grad.shape, shard)
    return bits, *other_bits(bits)
