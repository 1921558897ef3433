"""Gradients of a loss that is traced with plain parameters and evaluated with the stored kernels.

The loss sees arrays in the parameters' original dtypes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fp8jax.dot import Weight
from fp8jax.gradients.slots import grad_slot, state_at
from fp8jax.quantization import is_scaled
from fp8jax.rewrite import (
    ParamView,
    Plan,
    Static,
    Tracked,
    aval_of,
    can_be_kernel,
    evaluate,
    find_dots,
    live_jaxpr,
    names_of,
    plain_parameters,
)
from fp8jax.scaling.merge import to_fm32
from fp8jax.variables import PARAMS, SCALING


class _Param(NamedTuple):
    """One leaf of the parameters."""

    path: Any  # JAX tree path
    leaf: Any  # array or ScaledArray; with ZeRO this device's shard
    shard: Any  # `ShardSpec`; None for a whole parameter

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.path)

    @property
    def view(self) -> ParamView | None:
        """The parameter as an input of the loss; None if it cannot be a kernel."""
        if self.shard is None and not can_be_kernel(self.leaf):
            return None
        return ParamView.of(self.names, self.aval)

    @property
    def aval(self) -> Any:
        """The whole parameter's shape and original dtype."""
        aval = aval_of(self.leaf)
        if self.shard is None:
            return aval
        return jax.ShapeDtypeStruct(self.shard.whole_shape(self.leaf.shape), aval.dtype)


def gradient(
    loss_fn: Callable[..., Any], variables: Mapping[str, Any], args: Any, kwargs: Any, shardings: Any
) -> tuple[Any, Any, Any]:
    """The gradients of `loss_fn(variables, *args, **kwargs)`, a pair of a scalar and auxiliary outputs.

    Args:
        loss_fn: the loss.
        variables, args, kwargs: its arguments; on one of many devices, its shards.
        shardings: the `GradSharding` of each parameter; a tree like the parameters.

    Returns:
        The auxiliary outputs; the gradients before `slots.quantized`, float arrays or `FP8_GRAD` codes with
        their scale in the state; and the state's cotangents, dtype `fm32`.
    """
    others = {name: tree for name, tree in variables.items() if name not in (PARAMS, SCALING)}
    flat, treedef = jax.tree.flatten_with_path(variables[PARAMS], is_leaf=is_scaled)
    shards = treedef.flatten_up_to(shardings)
    params = [_Param(*pair, sharding.shard) for pair, sharding in zip(flat, shards, strict=True)]
    state = to_fm32(variables.get(SCALING, {}))
    static, arrays = Static.of((others, args, kwargs))

    def call(leaves: list[Any], state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        others, args, kwargs = static.filled(arrays)
        scaling = {SCALING: state} if SCALING in variables else {}
        return loss_fn({**others, PARAMS: treedef.unflatten(leaves), **scaling}, *args, **kwargs)

    with plain_parameters():
        jaxpr, consts, shapes = live_jaxpr(call, [each.aval for each in params], state, arrays)
    found = find_dots(jaxpr, [each.view for each in params])
    plan = Plan.of((), programs=found.programs)
    slots = [
        grad_slot(each.leaf, each.shard, state_at(state, each.path), found.uses.get(each.names))
        for each in params
    ]
    is_own = [slot is each.leaf for slot, each in zip(slots, params, strict=True)]

    def loss(slots: list[Any], state: Any) -> tuple[Any, Any]:
        ins = [_input(*each) for each in zip(params, slots, is_own, strict=True)]
        outs = evaluate(plan, jaxpr, consts, [*ins, *jax.tree.leaves(state), *arrays], {})
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    # allow_int, because `jax.grad` does not accept the extended dtypes of slots and state as floats.
    grad_fn = jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    (grads, new_state), out = grad_fn(slots, state)
    return out, treedef.unflatten(grads), new_state


def _input(param: _Param, slot: Any, is_own: bool) -> Any:
    """A parameter as an input of `evaluate`; its gradient is that of `slot`, which may be the parameter."""
    if param.view is None:
        return slot
    return Tracked(Weight(slot) if is_own else Weight(param.leaf, slot, param.shard), param.view)
