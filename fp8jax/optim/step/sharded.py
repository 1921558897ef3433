"""The sharded Adam step: each device updates its shards of the tensors, see `comm.Zero`."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from fp8jax.comm import Zero
from fp8jax.comm.gather import whole_from_parts
from fp8jax.comm.zero import own_part
from fp8jax.optim.guard.replace_update import ReplaceUpdate, replaces
from fp8jax.optim.step.arithmetic import AdamScalars, ParamState
from fp8jax.optim.step.encode_state import Rounding, Written
from fp8jax.optim.step.fused import StateSharding, fused_adam
from fp8jax.quantization import ScaledArray, is_scaled, plain


def advance_over_devices(
    zero: Zero,
    leaves: list[ParamState],
    scalars: AdamScalars,
    seeds: Any,
    decays: tuple[str, ...],
    rounding: Rounding,
) -> tuple[list[Written], jax.Array]:
    """`fused_adam` on sharded global arrays. All devices use the same scales, and all take or skip the step.

    From stage 1 on, gradients, moments and master weights are sharded. In stages 1 and 2 each device computes
    its shard of a replicated weight; the shards are all-gathered as FP8 codes, not as float32.
    """
    axes = [zero.split_of(_param(leaf)) if zero.shards_states else None for leaf in leaves]

    def specs(leaf: ParamState, axis: int | None) -> ParamState:
        split: Any = zero.specs(leaf, split=axis is not None)
        if zero.shards_weights or leaf.param is None:
            return split
        return split._replace(param=zero.spec(leaf.param, split=False))

    def written_specs(leaf: ParamState, axis: int | None) -> Written:
        split, update = (
            specs(leaf, axis),
            zero.spec(leaf.grad, split=axis is not None and zero.shards_weights),
        )
        update = update.data if is_scaled(update) else update
        if is_scaled(leaf.param):
            update = ScaledArray(ReplaceUpdate(update, P()), ReplaceUpdate(P(), P()))
        return Written(update, split.mu, split.nu, split.master, split.remainder)

    def on_device(
        leaves: list[ParamState], scalars: AdamScalars, seeds: Any
    ) -> tuple[list[Written], jax.Array]:
        mine = [_own(leaf, axis, zero) for leaf, axis in zip(leaves, axes, strict=True)]
        new, ok = fused_adam(mine, scalars, seeds, decays, rounding, StateSharding(zero.axis, tuple(axes)))
        return new if zero.shards_weights else _whole(new, axes, zero), ok

    leaves = [_fetched(leaf._replace(grad=plain(leaf.grad)), zero) for leaf in leaves]
    in_specs = [specs(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    out_specs = [written_specs(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    new, ok = zero.on_each(on_device, (in_specs, P(), P()), (out_specs, P()), leaves, scalars, seeds)
    if zero.offload:
        new = [
            Written(update, *zero.place_state(list(stored), [_param(leaf)] * 4))
            for (update, *stored), leaf in zip(new, leaves, strict=True)
        ]
    return new, ok


def _param(leaf: ParamState) -> Any:
    return leaf.grad if leaf.param is None else leaf.param


def _fetched(leaf: ParamState, zero: Zero) -> ParamState:
    """The leaf with offloaded state copied from host memory to the device."""
    if not zero.offload:
        return leaf
    stored = [leaf.mu, leaf.nu, leaf.master, leaf.remainder]
    mu, nu, master, remainder = zero.place_state(stored, [_param(leaf)] * 4, "device")
    return leaf._replace(mu=mu, nu=nu, master=master, remainder=remainder)


def _own(leaf: ParamState, axis: int | None, zero: Zero) -> ParamState:
    if zero.shards_weights or leaf.param is None:
        return leaf
    if is_scaled(leaf.param):
        part = ScaledArray(own_part(leaf.param.data, axis, zero.axis), leaf.param.scale)
        return leaf._replace(param=part)
    return leaf._replace(param=own_part(leaf.param, axis, zero.axis))


def _whole(new: list[Written], axes: list[int | None], zero: Zero) -> list[Written]:
    """All-gathers the updates."""
    split = [(i, axis) for i, axis in enumerate(axes) if axis is not None]
    updates = [new[i].update for i, _ in split]
    arrays = [update.data.bits if replaces(update) else update for update in updates]
    whole = whole_from_parts(arrays, [axis for _, axis in split], zero.axis)
    new = list(new)
    for (i, _), update, array in zip(split, updates, whole, strict=True):
        if replaces(update):
            array = ScaledArray(ReplaceUpdate(array, update.data.tag), update.scale)
        new[i] = new[i]._replace(update=array)
    return new
