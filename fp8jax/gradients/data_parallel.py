"""Data-parallel gradients with ZeRO sharding: per-device gradients under `shard_map`, then reductions.

The variables are global arrays. The `GradSharding` of each parameter says whether the dot's backward reduces
its gradient, and when a sharded parameter is all-gathered. `ShardContext.sharding` decides it, by the
parameter's uses in the loss and by what `fp8jax.comm.Zero` shards.

Each device's loss is divided by the number of devices, and gradients are summed. So output gradients, and the
scaling state, equal those of one device with the whole batch.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8jax.comm import Zero
from fp8jax.comm.gather import whole_from_parts
from fp8jax.comm.reduce import merged, reduced
from fp8jax.comm.shard import ShardSpec
from fp8jax.gradients.keys import check_batch, check_given
from fp8jax.quantization import ScaledArray, is_scaled
from fp8jax.rewrite import StaticTree, Uses, aval_of
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING


class GradSharding(NamedTuple):
    """The sharding of a parameter and its gradient."""

    axis: int | None = None  # the gradient's sharded axis, negative; None if replicated
    shard: ShardSpec | None = None  # given if the dot's backward reduces the gradient


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GradShardings:
    """The shardings of all parameters' gradients; a tree without leaves."""

    of_params: tuple[GradSharding, ...]  # in the order of the leaves
    comm: str | None  # format in which gradients are sent that no dot's backward reduces; None for their own


@dataclasses.dataclass(frozen=True)
class ShardContext:
    """The sharding context of a per-device function."""

    zero: Zero | None = None  # None for a program of one device
    axes: tuple[int | None, ...] = ()  # the sharded axis of each parameter's gradient

    @property
    def devices(self) -> int:
        """The number of devices that share the batch."""
        return 1 if self.zero is None else self.zero.devices

    @property
    def device_index(self) -> Any:
        """The number of this device."""
        return 0 if self.zero is None else lax.axis_index(self.zero.axis)

    def axes_of(self, treedef: Any) -> tuple[int | None, ...]:
        """The sharded axes of the parameters of this tree."""
        return self.axes or (None,) * treedef.num_leaves

    def aval(self, leaf: Any, axis: int | None) -> Any:
        """The shape and original dtype of a whole parameter; `leaf` is this device's shard."""
        aval = aval_of(leaf)
        if self.zero is None or not self.zero.shards_weights or axis is None:
            return aval
        shape = [*aval.shape]
        shape[axis] *= self.devices
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    def sharding(self, axis: int | None, uses: Uses | None) -> GradSharding:
        """The sharding of a parameter by its uses in the loss; `axis` is the sharded axis of its gradient."""
        if self.zero is None or axis is None:
            return GradSharding()
        kernel = None if uses is None else uses.kernel
        # Under a `jax.vmap` a dot's backward would send the gradient of each example.
        if uses is None or uses.is_batched or kernel is None or not kernel.is_stacked_in_front:
            return GradSharding(axis)
        # A kernel with other uses is gathered once, not by its dot.
        in_dots_only = uses.dots > 0 and not uses.others
        return GradSharding(
            axis, ShardSpec.of(self.zero, axis, kernel.recipe.comm, in_dots_only=in_dots_only)
        )

    def whole(self, leaves: list[Any], shardings: Sequence[GradSharding]) -> list[Any]:
        """The parameters, after all-gathering the shards that no dot gathers."""
        axes = {
            i: each.axis
            for i, each in enumerate(shardings)
            if each.axis is not None and not (each.shard and each.shard.is_part)
        }
        if self.zero is None or not self.zero.shards_weights or not axes:
            return leaves
        whole = whole_from_parts([leaves[i] for i in axes], [*axes.values()], self.zero.axis)
        new = dict(zip(axes, whole, strict=True))
        return [new.get(i, leaf) for i, leaf in enumerate(leaves)]


# `grad_fn(loss_fn, variables, args, kwargs)` returns `((loss, aux), grads)`. `variables` and `grads` are
# dicts of collections, and `loss_fn(variables, *args, **kwargs)` returns `(loss, aux)`.
GradFn = Callable[[Callable[..., Any], Any, Any, Any], tuple[Any, Any]]


def over_devices(on_device: Callable[..., tuple[Any, Any, GradShardings]], zero: Zero | None) -> GradFn:
    """The gradient function on one device, or on all devices of a mesh.

    Args:
        on_device: the gradient function of one device: a `GradFn` with a `ShardContext` as first argument,
            that also returns the `GradShardings`.
        zero: the mesh and the ZeRO stage; None for one device.

    Auxiliary outputs are stacked over the devices.
    """
    if zero is None:
        return lambda *args: on_device(ShardContext(), *args)[:2]

    def run(loss_fn: Callable[..., Any], variables: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if axes := jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "`zero`: expected a call outside of `jax.shard_map` and `jax.pmap`, since `zero` maps over "
                f"the devices itself; got one inside of {', '.join(map(repr, axes))}. There take "
                f"axis_name={axes[0]!r} in its place."
            )
        params = variables[PARAMS]
        fold = f"`jax.random.fold_in(key, jax.lax.axis_index({zero.axis!r}))`"
        advice = f"a keyword argument, and let the loss draw by {fold}"
        check_given(args, kwargs, zero.devices)
        check_batch(args, zero.devices, f"the {zero.devices} devices of axis {zero.axis!r}", advice)
        leaves = jax.tree.leaves(params, is_leaf=is_scaled)
        context = ShardContext(
            zero, tuple(zero.split_of(leaf) if zero.shards_states else None for leaf in leaves)
        )
        static, arrays = StaticTree.of(kwargs)

        def mapped(variables: Any, args: Any, arrays: Any) -> Any:
            kwargs = static.filled(arrays)
            (loss, aux), grads, shardings = on_device(context, loss_fn, variables, args, kwargs)
            aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            return (lax.psum(loss, zero.axis), aux), *_reduced(grads, shardings, zero)

        def spec_of_grad(leaf: Any) -> Any:
            spec = zero.spec(leaf, split=zero.shards_states)
            return spec.data if is_scaled(leaf) else spec

        of_variables = {name: P() for name in variables}
        of_params = {PARAMS: zero.specs(params, split=zero.shards_weights)}
        of_states = {name: P() for name in (SCALING, LOSS_SCALE) if name in variables}
        of_grads = jax.tree.map(spec_of_grad, params, is_leaf=is_scaled)
        in_specs = {**of_variables, **of_params}, P(zero.axis), P()
        out_specs = (P(), P(zero.axis)), of_states, of_grads, P()
        with _clear_constraints(zero.axis):
            out, states, data, scales = zero.on_each(mapped, in_specs, out_specs, variables, args, arrays)
        data, treedef = jax.tree.flatten(data)
        grads = [x if (scale := scales.get(i)) is None else ScaledArray(x, scale) for i, x in enumerate(data)]
        return out, {**states, PARAMS: treedef.unflatten(grads)}

    return run


@contextlib.contextmanager
def _clear_constraints(axis: str) -> Iterator[None]:
    """Replaces JAX's errors for a sharding constraint that names the axis of the devices."""
    try:
        yield
    except ValueError as error:
        named = r"only refer to Auto axes|contains (a|the) manual ax|of type Auto or Manual"
        if not re.search(named, str(error)) or repr(axis) not in str(error):
            raise
        raise ValueError(
            f"`zero`: expected sharding constraints, and rules of logical axes, without {axis!r}; got one "
            f"that names it. Inside of `value_and_grad(..., zero=...)` each device has its own part of the "
            f"batch already, so leave {axis!r} out of them, as in `P(None, 'model')` or `('batch', None)`."
        ) from error


def _reduced(grads: Any, shardings: GradShardings, zero: Zero) -> tuple[Any, Any, dict[int, jax.Array]]:
    """This device's new states and gradients, after reducing those that no dot's backward has reduced.

    Returns:
        The states; the gradients' arrays or codes, a tree like the parameters; and the scales of codes, by
        the number of the parameter.
    """
    leaves, treedef = jax.tree.flatten(grads[PARAMS], is_leaf=is_scaled)
    left = [i for i, sharding in enumerate(shardings.of_params) if sharding.shard is None]
    floats = "FP32" if any(map(is_scaled, leaves)) else None
    axes = [shardings.of_params[i].axis for i in left]
    new, _ = reduced([leaves[i] for i in left], axes, zero.axis, shardings.comm, op="sum", floats=floats)
    for i, leaf in zip(left, new, strict=True):
        leaves[i] = leaf
    scales = {i: leaf.scale for i, leaf in enumerate(leaves) if is_scaled(leaf)}
    data = treedef.unflatten([leaf.data if is_scaled(leaf) else leaf for leaf in leaves])
    states = {name: tree for name, tree in grads.items() if name != PARAMS}
    return merged(states, zero.axis), data, scales
