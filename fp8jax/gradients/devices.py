"""Data-parallel gradients with ZeRO sharding: per-device gradients under `shard_map`, then reductions.

    over_devices(make, zero, has_aux)(variables, batch)

The variables are global arrays. `make` builds the per-device function from the `GradSharding` of each
parameter: whether the backward reduces its gradient, and when a sharded parameter is all-gathered.

Each device's loss is divided by the number of devices, and gradients are summed. So output gradients, and the
scaling state, equal those of one device with the whole batch.
"""

import dataclasses
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
from fp8jax.dot.dot_general import OPERANDS
from fp8jax.gradients.keys import refuse_whole
from fp8jax.gradients.slots import WGRAD_SCALE
from fp8jax.gradients.states import state_at
from fp8jax.quantization import ScaledArray, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params


@dataclasses.dataclass(frozen=True)
class GradSharding:
    """The sharding of a parameter and its gradient; a leaf of a tree like the parameters."""

    axis: int | None = None  # the gradient's sharded axis, negative; None if replicated
    shard: ShardSpec | None = None  # given if the dot's backward reduces the gradient
    comes_whole: bool = True  # False for a sharded parameter that is all-gathered before the loss


class ShardContext(NamedTuple):
    """The sharding context of a per-device function."""

    zero: Zero
    shardings: Any  # tree like the parameters

    def whole(self, params: Any) -> Any:
        """The parameters, after all-gathering the shards that no dot gathers."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        shardings = jax.tree.leaves(self.shardings)
        parts = [i for i, sharding in enumerate(shardings) if not sharding.comes_whole]
        axes = [shardings[i].axis for i in parts]
        arrays = [leaves[i].data if is_scaled(leaves[i]) else leaves[i] for i in parts]
        for i, array in zip(parts, whole_from_parts(arrays, axes, self.zero.axis), strict=True):
            leaves[i] = ScaledArray(array, leaves[i].scale) if is_scaled(leaves[i]) else array
        return treedef.unflatten(leaves)

    def reduced(self, grads: Any) -> Any:
        """This device's gradients, after reducing those that no dot's backward has reduced."""
        params, rest = (grads[PARAMS], grads) if has_params(grads) else (grads, None)
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
        shardings = jax.tree.leaves(self.shardings)
        left = [i for i, sharding in enumerate(shardings) if sharding.shard is None]
        floats = "FP32" if any(map(is_scaled, leaves)) else None
        axes = [shardings[i].axis for i in left]
        row = Recipe.parse(self.zero.recipe)
        new, _ = reduced([leaves[i] for i in left], axes, self.zero.axis, row, op="sum", floats=floats)
        for i, leaf in zip(left, new, strict=True):
            leaves[i] = leaf
        params = treedef.unflatten(leaves)
        return params if rest is None else {**merged(rest, self.zero.axis), PARAMS: params}


def over_devices(
    make: Callable[[ShardContext], Callable[..., Any]], zero: Zero, has_aux: bool
) -> Callable[..., Any]:
    """The gradient function on all devices of a mesh.

    Args:
        make: returns the per-device gradient function for a context.
        zero: the mesh and the ZeRO stage.
        has_aux: whether there are auxiliary outputs; they are stacked over the devices.
    """

    def run(variables: Any, *args: Any, **kwargs: Any) -> Any:
        _check_batch(args, zero)
        is_flax = has_params(variables)
        params = variables[PARAMS] if is_flax else variables
        states = state_of_each(params, variables.get(SCALING, {}) if is_flax else {})
        shardings = _shardings(params, states, zero)
        local = ShardContext(zero, shardings)

        options, treedef = jax.tree.flatten(kwargs)
        arrays = {i: x for i, x in enumerate(options) if hasattr(x, "dtype")}

        def on_device(variables: Any, args: Any, arrays: Any) -> Any:
            # Keyword arguments that are not arrays, such as flags, are constants.
            kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(options)])
            out, grads = make(local)(variables, *args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            return lax.psum(loss, zero.axis), aux, local.reduced(grads)

        def spec_of_grad(leaf: Any, sharding: GradSharding, state: Any) -> Any:
            names = zero.spec(leaf, split=sharding.axis is not None)
            names = names.data if is_scaled(leaf) else names
            return ScaledArray(names, P()) if state.has_fp8_grad else names

        everywhere = {name: P() for name in (SCALING, LOSS_SCALE) if is_flax and name in variables}
        of_grads = jax.tree.map(spec_of_grad, params, shardings, states, is_leaf=is_scaled)
        of_params = zero.specs(params, split=zero.stage == 3)
        of_variables = {name: P() for name in variables} if is_flax else of_params
        in_specs = ({**of_variables, PARAMS: of_params} if is_flax else of_params, P(zero.axis), P())
        out_specs = (P(), P(zero.axis), {**everywhere, PARAMS: of_grads} if is_flax else of_grads)
        loss, aux, grads = zero.on_each(on_device, in_specs, out_specs, variables, args, arrays)
        return ((loss, aux) if has_aux else loss), grads

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class ParamScaling:
    """The scaling state of one parameter, or {}; a leaf of a tree like the parameters."""

    arrays: Mapping[str, Any]

    @property
    def has_fp8_grad(self) -> bool:
        """Whether the parameter's gradient is FP8."""
        return WGRAD_SCALE in self.arrays


def state_of_each(params: Any, state: Any) -> Any:
    """The `ParamScaling` of each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: ParamScaling(state_at(state, path)), params, is_leaf=is_scaled
    )


def _shardings(params: Any, states: Any, zero: Zero) -> Any:
    def sharding(path: Any, leaf: Any, state: ParamScaling) -> GradSharding:
        axis = zero.split_of(leaf) if zero.stage else None
        if axis is None:
            return GradSharding()
        if zero.stage == 1 or not (is_scaled(leaf) or state.arrays) or not _is_stacked_in_front(leaf, state):
            return GradSharding(axis, None, zero.stage < 3)
        # Only parameters named "kernel" are left sharded for their dot to gather; others may have other uses.
        names = [part.key for part in path if hasattr(part, "key")]
        waits = zero.stage == 3 and names[-1:] == ["kernel"]
        shard = ShardSpec(zero.axis, axis, zero.devices, Recipe.parse(zero.recipe).comm, waits)
        return GradSharding(axis, shard, zero.stage < 3 or waits)

    return jax.tree_util.tree_map_with_path(sharding, params, states, is_leaf=is_scaled)


def _is_stacked_in_front(leaf: Any, state: ParamScaling) -> bool:
    """Whether a kernel is one layer's, or stacked along its first axes, according to its scaling state."""
    scale = state.arrays.get("scale")
    if scale is None:
        return True
    depth = scale.ndim - 1
    return scale.shape == (*leaf.shape[:depth], len(OPERANDS))


def _check_batch(args: Any, zero: Zero) -> None:
    fold = f"`jax.random.fold_in(key, jax.lax.axis_index({zero.axis!r}))`"
    refuse_whole(args, zero.devices, f"a keyword argument, and let the loss draw by {fold}")
    for leaf in jax.tree.leaves(args):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % zero.devices:
            raise ValueError(
                f"with `zero`, a batch array's first axis must divide by the {zero.devices} devices of axis "
                f"{zero.axis!r}; got shape {shape}. What is no batch goes in as a keyword argument."
            )
