"""Gradients of a loss that is traced with plain parameters and evaluated with the stored kernels.

The loss sees arrays in the parameters' original dtypes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core

from fp8jax.dot import Weight
from fp8jax.gradients.data_parallel import GradShardings, ShardContext
from fp8jax.gradients.slots import grad_slot, in_format
from fp8jax.quantization import checked_parameter, is_scaled
from fp8jax.rewrite import (
    FoundDots,
    Kernel,
    ParamView,
    Plan,
    StaticTree,
    Tracked,
    Uses,
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
    aval: Any  # the whole parameter's shape and original dtype
    shard: Any = None  # `ShardSpec`; None for a whole parameter
    uses: Uses | None = None  # in the loss

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.path)

    @property
    def view(self) -> ParamView | None:
        """The parameter as an input of the loss; None if it cannot be a kernel."""
        return ParamView.of(self.names, self.aval) if can_be_kernel(self.leaf) else None

    def input(self, slot: Any, *, is_own: bool) -> Any:
        """The parameter as an input of `evaluate`; its gradient is the gradient of `slot`."""
        if self.view is None:
            return slot
        return Tracked(Weight(slot) if is_own else Weight(self.leaf, slot, self.shard), self.view)


def _uses(found: FoundDots, param: _Param) -> Uses | None:
    """A parameter's uses. A stored kernel without an FP8 dot has a gradient in the format of the others."""
    uses = found.uses.get(param.names)
    if not found.recipes or not is_scaled(param.leaf) or (uses is not None and uses.kernel is not None):
        return uses
    return dataclasses.replace(uses or Uses(), kernel=Kernel(found.recipes[0], (), 0))


def gradient(
    context: ShardContext, loss_fn: Callable[..., Any], variables: Mapping[str, Any], args: Any, kwargs: Any
) -> tuple[Any, Any, Any, GradShardings]:
    """The gradients of `loss_fn(variables, *args, **kwargs)`, a pair of a scalar and auxiliary outputs.

    Args:
        context: the sharding of the parameters.
        loss_fn: the loss.
        variables, args, kwargs: its arguments; on one of many devices, its shards.

    Returns:
        The auxiliary outputs; the gradients in their formats; the state's cotangents, dtype `fm32`; and the
        shardings of the gradients.
    """
    others = {name: tree for name, tree in variables.items() if name not in (PARAMS, SCALING)}
    flat, treedef = jax.tree.flatten_with_path(variables[PARAMS], is_leaf=is_scaled)
    axes = context.axes_of(treedef)
    params = [_Param(*pair, context.aval(pair[1], axis)) for pair, axis in zip(flat, axes, strict=True)]
    state = to_fm32(variables.get(SCALING, {}))
    static, arrays = StaticTree.of((others, args, kwargs))

    def call(leaves: list[Any], state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        others, args, kwargs = static.filled(arrays)
        scaling = {SCALING: state} if SCALING in variables else {}
        return loss_fn({**others, PARAMS: treedef.unflatten(leaves), **scaling}, *args, **kwargs)

    with plain_parameters():
        jaxpr, consts, shapes = live_jaxpr(call, [each.aval for each in params], state, arrays)
    found = find_dots(jaxpr, [each.view for each in params], states=len(jax.tree.leaves(state)))
    plan = Plan.of((), programs=found.programs)
    uses = [_uses(found, each) for each in params]
    shardings = [context.sharding(*pair) for pair in zip(axes, uses, strict=True)]
    leaves = context.whole([checked_parameter(each.leaf) for each in params], shardings)
    rows = zip(params, leaves, shardings, uses, strict=True)
    params = [each._replace(leaf=leaf, shard=s.shard, uses=of) for each, leaf, s, of in rows]
    slots = [grad_slot(each.leaf, each.shard, each.uses) for each in params]
    is_own = [slot is each.leaf for slot, each in zip(slots, params, strict=True)]

    def loss(slots: list[Any], state: Any) -> tuple[Any, Any]:
        ins = [each.input(slot, is_own=own) for each, slot, own in zip(params, slots, is_own, strict=True)]
        outs = evaluate(plan, jaxpr, consts, [*ins, *jax.tree.leaves(state), *arrays], {})
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    # allow_int, because `jax.grad` does not accept the extended dtypes of slots and state as floats.
    grad_fn = jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((slots, state)))
    # In compiled code only, JAX maps a `custom_vjp` with symbolic zeros over devices.
    if any(dot.place.is_on_each for dot in found.dots) and not is_traced:
        grad_fn = jax.jit(grad_fn)
    (grads, new_state), out = grad_fn(slots, state)
    grads = [
        grad if own else in_format(grad, each.leaf, each.shard, each.uses)
        for grad, own, each in zip(grads, is_own, params, strict=True)
    ]
    comm = "FP32" if context.zero is None else context.zero.comm_of(found.recipes)
    return out, treedef.unflatten(grads), new_state, GradShardings(tuple(shardings), comm)
