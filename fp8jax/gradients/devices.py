"""Data-parallel gradients with ZeRO sharding: per-device gradients under `shard_map`, then reductions.

The variables are global arrays. The `GradSharding` of each parameter says whether the dot's backward reduces
its gradient, and when a sharded parameter is all-gathered.

Each device's loss is divided by the number of devices, and gradients are summed. So output gradients, and the
scaling state, equal those of one device with the whole batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8jax.comm import Zero
from fp8jax.comm.gather import whole_from_parts
from fp8jax.comm.reduce import merged, reduced
from fp8jax.comm.shard import ShardSpec
from fp8jax.dot.dot_general import init_state
from fp8jax.gradients.keys import check_batch
from fp8jax.gradients.slots import WGRAD_SCALE, state_at
from fp8jax.quantization import ScaledArray, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Static
from fp8jax.scaling import OPERANDS
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING


@dataclasses.dataclass(frozen=True)
class GradSharding:
    """The sharding of a parameter and its gradient; a leaf of a tree like the parameters."""

    axis: int | None = None  # the gradient's sharded axis, negative; None if replicated
    shard: ShardSpec | None = None  # given if the dot's backward reduces the gradient


class ShardContext(NamedTuple):
    """The sharding context of a per-device function."""

    zero: Zero | None  # None for a program of one device
    shardings: Any  # tree like the parameters

    @property
    def devices(self) -> int:
        """The number of devices that share the batch."""
        return 1 if self.zero is None else self.zero.devices

    @property
    def device_index(self) -> Any:
        """The number of this device."""
        return 0 if self.zero is None else lax.axis_index(self.zero.axis)

    def whole(self, params: Any) -> Any:
        """The parameters, after all-gathering the shards that no dot gathers."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        shardings = jax.tree.leaves(self.shardings)
        parts = [i for i, each in enumerate(shardings) if not (each.shard and each.shard.is_part)]
        parts = [i for i in parts if shardings[i].axis is not None]
        if self.zero is None or self.zero.stage < 3 or not parts:
            return params
        axes = [shardings[i].axis for i in parts]
        whole = whole_from_parts([leaves[i] for i in parts], axes, self.zero.axis)
        for i, leaf in zip(parts, whole, strict=True):
            leaves[i] = leaf
        return treedef.unflatten(leaves)


# `grad_fn(loss_fn, variables, args, kwargs)` returns `((loss, aux), grads)`. `variables` and `grads` are
# dicts of collections, and `loss_fn(variables, *args, **kwargs)` returns `(loss, aux)`.
GradFn = Callable[[Callable[..., Any], Any, Any, Any], tuple[Any, Any]]


def over_devices(on_device: Callable[..., tuple[Any, Any]], zero: Zero | None) -> GradFn:
    """The gradient function on one device, or on all devices of a mesh.

    Args:
        on_device: the gradient function of one device: a `GradFn` with a `ShardContext` as first argument.
        zero: the mesh and the ZeRO stage; None for one device.

    Auxiliary outputs are stacked over the devices.
    """
    if zero is None:
        return functools.partial(_alone, on_device)

    def run(loss_fn: Callable[..., Any], variables: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        params, states = variables[PARAMS], variables.get(SCALING, {})
        fold = f"`jax.random.fold_in(key, jax.lax.axis_index({zero.axis!r}))`"
        advice = f"a keyword argument, and let the loss draw by {fold}"
        check_batch(args, zero.devices, f"the {zero.devices} devices of axis {zero.axis!r}", advice)
        shardings = jax.tree.map_with_path(
            lambda path, leaf: _sharding(path, leaf, state_at(states, path), zero), params, is_leaf=is_scaled
        )
        static, arrays = Static.of(kwargs)

        def mapped(variables: Any, args: Any, arrays: Any) -> Any:
            kwargs = static.filled(arrays)
            context = ShardContext(zero, shardings)
            (loss, aux), grads = on_device(context, loss_fn, variables, args, kwargs)
            aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            return (lax.psum(loss, zero.axis), aux), _reduced(grads, shardings, zero)

        def spec_of_grad(path: Any, leaf: Any, sharding: GradSharding) -> Any:
            spec = zero.spec(leaf, split=sharding.axis is not None)
            spec = spec.data if is_scaled(leaf) else spec
            return ScaledArray(spec, P()) if WGRAD_SCALE in state_at(states, path) else spec

        of_variables = {name: P() for name in variables}
        of_params = {PARAMS: zero.specs(params, split=zero.stage == 3)}
        of_grads = {name: P() for name in (SCALING, LOSS_SCALE) if name in variables}
        of_grads[PARAMS] = jax.tree.map_with_path(spec_of_grad, params, shardings, is_leaf=is_scaled)
        in_specs = {**of_variables, **of_params}, P(zero.axis), P()
        out_specs = (P(), P(zero.axis)), of_grads
        return zero.on_each(mapped, in_specs, out_specs, variables, args, arrays)

    return run


def _alone(on_device: Callable[..., Any], loss_fn: Any, variables: Any, args: Any, kwargs: Any) -> Any:
    shardings = jax.tree.map(lambda leaf: GradSharding(), variables[PARAMS], is_leaf=is_scaled)
    return on_device(ShardContext(None, shardings), loss_fn, variables, args, kwargs)


def _reduced(grads: Any, shardings: Any, zero: Zero) -> Any:
    """This device's gradients, after reducing those that no dot's backward has reduced."""
    leaves, treedef = jax.tree.flatten(grads[PARAMS], is_leaf=is_scaled)
    all_shardings = jax.tree.leaves(shardings)
    left = [i for i, sharding in enumerate(all_shardings) if sharding.shard is None]
    floats = "FP32" if any(map(is_scaled, leaves)) else None
    axes = [all_shardings[i].axis for i in left]
    comm = Recipe.parse(zero.recipe).comm
    new, _ = reduced([leaves[i] for i in left], axes, zero.axis, comm, op="sum", floats=floats)
    for i, leaf in zip(left, new, strict=True):
        leaves[i] = leaf
    return {**merged(grads, zero.axis), PARAMS: treedef.unflatten(leaves)}


def _sharding(path: Any, leaf: Any, state: Mapping[str, Any], zero: Zero) -> GradSharding:
    """The sharding of one parameter; `state` is its scaling state, or {}."""
    axis = zero.split_of(leaf) if zero.stage else None
    if axis is None:
        return GradSharding()
    # Only parameters named "kernel" are left sharded for their dot to gather; others may have other uses.
    names, recipe = [part.key for part in path if hasattr(part, "key")], Recipe.parse(zero.recipe)
    is_kernel = names[-1:] == ["kernel"]
    is_stateless = is_kernel and recipe.is_quantized and not init_state(recipe)
    is_of_dot = is_scaled(leaf) or state or is_stateless
    if zero.stage == 1 or not is_of_dot or not _is_stacked_in_front(leaf, state):
        return GradSharding(axis)
    return GradSharding(
        axis, ShardSpec(zero.axis, axis, zero.devices, recipe.comm, zero.stage == 3 and is_kernel)
    )


def _is_stacked_in_front(leaf: Any, state: Mapping[str, Any]) -> bool:
    """Whether a kernel is one layer's, or stacked along its first axes, according to its scaling state."""
    scale = state.get("scale")
    if scale is None:
        return True
    depth = scale.ndim - 1
    return scale.shape == (*leaf.shape[:depth], len(OPERANDS))
