"""Gradients of a loss that is traced with plain parameters and evaluated with the stored kernels.

The loss sees arrays in the parameters' original dtypes.

The gradient of an FP8 dot's kernel is E4M3 codes and a scale. With one FP8 dot and no other use of the
kernel, both are the cotangent of a `GradSlot`. The gradients of a kernel with other uses (a second dot,
weight decay in the loss, or the examples of a `jax.vmap` of the model) are summed in float32 and quantized
afterwards.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from fp8jax import rewrite
from fp8jax.comm.buckets import on_common_scales
from fp8jax.comm.zero import own_part
from fp8jax.dot import GradSlot, Weight
from fp8jax.gradients.data_parallel import GradShardings, ShardContext
from fp8jax.quantization import ScaledArray, checked_parameter, is_scaled, quantize_gradient
from fp8jax.rewrite import FoundDots, Kernel, ParamView, Plan, StaticTree, Tracked, Uses
from fp8jax.scaling.merge import to_fm32
from fp8jax.variables import PARAMS, SCALING


class TracedLoss(NamedTuple):
    """A loss of plain parameters, traced."""

    jaxpr: Any
    consts: list[Any]
    out: Any  # tree structure of the result
    views: list[ParamView | None]  # the parameters as inputs; None for those that cannot be kernels
    arrays: list[Any]  # the inputs after parameters and states
    found: FoundDots

    @classmethod
    def of(
        cls,
        loss_fn: Callable[..., Any],
        variables: Mapping[str, Any],
        args: Any,
        kwargs: Any,
        avals: Sequence[Any],
        states: Mapping[str, Any],
    ) -> "TracedLoss":
        """Traces `loss_fn({**variables, **states}, *args, **kwargs)`.

        Args:
            loss_fn: the loss.
            variables, args, kwargs: its arguments.
            avals: shapes and original dtypes of the parameters.
            states: collections that are inputs of their own: those that the gradient renews.
        """
        others = {name: tree for name, tree in variables.items() if name != PARAMS and name not in states}
        flat, treedef = jax.tree.flatten_with_path(variables[PARAMS], is_leaf=is_scaled)
        paths = rewrite.names_of([path for path, _ in flat])
        views = [
            ParamView.of(path, aval) if rewrite.can_be_kernel(leaf) else None
            for path, (_, leaf), aval in zip(paths, flat, avals, strict=True)
        ]
        static, arrays = StaticTree.of((others, args, kwargs))

        def call(leaves: list[Any], states: Any, arrays: list[Any]) -> Any:
            others, args, kwargs = static.filled(arrays)
            return loss_fn({**others, **states, PARAMS: treedef.unflatten(leaves)}, *args, **kwargs)

        with rewrite.plain_parameters():
            jaxpr, consts, shapes = rewrite.live_jaxpr(call, avals, states, arrays)
        found = rewrite.find_dots(jaxpr, views, states=len(jax.tree.leaves(states)))
        return cls(jaxpr, consts, jax.tree.structure(shapes), views, arrays, found)

    def evaluate(self, plan: Plan, inputs: list[Any], states: Mapping[Any, Any]) -> Any:
        """The loss of all inputs, its dots being those of the plan; see `fp8jax.rewrite.evaluate`."""
        return self.out.unflatten(rewrite.evaluate(plan, self.jaxpr, self.consts, inputs, states))


class _Param(NamedTuple):
    """A parameter of the loss."""

    leaf: Any  # array or ScaledArray; with ZeRO this device's shard
    view: ParamView | None  # as in `TracedLoss`
    shard: Any  # `ShardSpec`; None for a whole parameter
    uses: Uses | None  # in the loss

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """The shape of the scales of an FP8 gradient; None for a float gradient."""
        kernel = None if self.uses is None else self.uses.kernel
        if kernel is None or kernel.recipe.weight_grad != "E4M3":
            return None
        if is_scaled(self.leaf):
            return self.leaf.scale.shape
        return kernel.blocks(self.leaf) if kernel.layers or kernel.groups else ()

    @property
    def is_slot(self) -> bool:
        """Whether the parameter is its own slot: a plain one with a float gradient that no dot reduces."""
        return self.blocks is None and not is_scaled(self.leaf) and self.shard is None

    def slot(self) -> Any:
        """Zeros, or a `GradSlot`, with the gradient as cotangent; or the parameter itself."""
        if self.is_slot:
            return self.leaf
        like = self.leaf.data if is_scaled(self.leaf) else self.leaf
        if self.shard is not None and not self.shard.is_part:
            like = own_part(like, self.shard.axis, self.shard.axis_name)
        if self.blocks is not None and _is_alone(self.uses, self.blocks):
            return GradSlot.zeros(like, self.blocks)
        return jnp.zeros_like(like, jnp.float32)

    def input(self, slot: Any) -> Any:
        """The parameter as an input of the loss; its gradient is the gradient of `slot`."""
        if self.view is None:
            return slot
        return Tracked(Weight(slot) if self.is_slot else Weight(self.leaf, slot, self.shard), self.view)

    def gradient(self, cotangent: Any) -> Any:
        """The gradient in its format, from the cotangent of the slot.

        FP8 gradients are `ScaledArray`s, others of plain parameters in the parameter's dtype.
        """
        if self.is_slot:
            return cotangent
        if isinstance(cotangent, GradSlot):
            return cotangent.gradient()
        if self.blocks is not None:
            return in_blocks(cotangent, self.blocks, self.shard)
        return cotangent if is_scaled(self.leaf) else cotangent.astype(self.leaf.dtype)


def _is_alone(uses: Any, blocks: tuple[int, ...]) -> bool:
    """Whether one dot computes the whole gradient, with all of its scales."""
    scales = math.prod(uses.kernel.layers) * max(uses.kernel.groups, 1)
    is_once = uses.dots == 1 and not uses.others and not uses.is_shared and not uses.is_batched
    return is_once and math.prod(blocks) == scales


def in_blocks(grad: Any, blocks: tuple[int, ...], shard: Any) -> ScaledArray:
    """A float gradient as E4M3, with scales of shape `blocks` that devices with shards have in common."""
    if shard is None:
        return quantize_gradient(grad, blocks)
    return on_common_scales([grad], shard.axis_name, blocks)[0]


def _uses(found: FoundDots, view: ParamView | None, leaf: Any) -> Uses | None:
    """A parameter's uses. A stored kernel without an FP8 dot has a gradient in the format of the others."""
    uses = None if view is None else found.uses.get(view.path)
    if not found.recipes or not is_scaled(leaf) or (uses is not None and uses.kernel is not None):
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
        The auxiliary outputs; the gradients in their formats; the state's cotangents, dtype `fm32`, by the
        name of the collection; and the shardings of the gradients.
    """
    flat, treedef = jax.tree.flatten_with_path(variables[PARAMS], is_leaf=is_scaled)
    axes = context.axes_of(treedef)
    avals = [context.aval(leaf, axis) for (_, leaf), axis in zip(flat, axes, strict=True)]
    states = {SCALING: to_fm32(variables[SCALING])} if SCALING in variables else {}
    traced = TracedLoss.of(loss_fn, variables, args, kwargs, avals, states)
    found = traced.found
    plan = Plan.of((), programs=found.programs)
    uses = [_uses(found, view, leaf) for view, (_, leaf) in zip(traced.views, flat, strict=True)]
    shardings = [context.sharding(*pair) for pair in zip(axes, uses, strict=True)]
    leaves = context.whole([checked_parameter(leaf) for _, leaf in flat], shardings)
    shards = [each.shard for each in shardings]
    params = list(map(_Param, leaves, traced.views, shards, uses))
    slots = [param.slot() for param in params]

    def loss(slots: list[Any], states: Any) -> tuple[Any, Any]:
        ins = map(_Param.input, params, slots)
        return traced.evaluate(plan, [*ins, *jax.tree.leaves(states), *traced.arrays], {})

    # allow_int, because `jax.grad` does not accept the extended dtypes of slots and state as floats.
    grad_fn = jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((slots, states)))
    # In compiled code only, JAX maps a `custom_vjp` with symbolic zeros over devices.
    if any(dot.place.is_on_each for dot in found.dots) and not is_traced:
        grad_fn = jax.jit(grad_fn)
    (grads, new_states), out = grad_fn(slots, states)
    grads = treedef.unflatten(map(_Param.gradient, params, grads))
    comm = None if context.zero is None else context.zero.comm_of(found.recipes)
    return out, grads, new_states, GradShardings(tuple(shardings), comm)
