"""Gradients of a loss that is traced with plain parameters and evaluated with the stored kernels.

The loss sees arrays in the parameters' original dtypes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from fp8jax.gradients.slots import grad_slot
from fp8jax.gradients.states import state_at
from fp8jax.quantization import is_scaled
from fp8jax.rewrite import (
    Context,
    Plan,
    Tracked,
    Uses,
    Way,
    aval_of,
    evaluate,
    find,
    is_array,
    is_followed,
    names_of,
    plain_parameters,
)
from fp8jax.scaling.merge import to_fm32
from fp8jax.variables import PARAMS, SCALING, has_params


class Gradient(NamedTuple):
    """A loss and its gradients, before `slots.quantized`."""

    out: Any  # the loss, or the loss and auxiliary outputs
    grads: Any  # tree like the parameters: float arrays, or `FP8_GRAD` codes with their scale in the state
    state: Any  # the state's cotangents, dtype `fm32`


class _Param(NamedTuple):
    """One leaf of the parameters."""

    path: Any  # JAX tree path
    leaf: Any  # array or ScaledArray; with ZeRO this device's shard
    shard: Any  # `ShardSpec`; None for a whole parameter

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.path)

    @property
    def way(self) -> Way | None:
        """The start of the parameter's way to its dots; None if it cannot be a kernel."""
        if self.shard is None and not is_followed(self.leaf):
            return None
        return Way.of(self.names, self.aval.shape, self.aval.dtype)

    @property
    def aval(self) -> Any:
        """The whole parameter's shape and original dtype."""
        aval = aval_of(self.leaf)
        if self.shard is None:
            return aval
        return jax.ShapeDtypeStruct(self.shard.whole_shape(self.leaf.shape), aval.dtype)


class _Trace(NamedTuple):
    """The jaxpr of a loss."""

    jaxpr: Any
    consts: Any
    out_tree: Any  # of (loss, aux)
    ways: list[Way | None]
    uses: Mapping[tuple[str, ...], Uses]
    context: Context


def gradient(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    variables: Any,
    args: Any,
    kwargs: Any,
    shardings: Any,
    divisor: int = 1,
) -> Gradient:
    """`jax.value_and_grad(loss_fn)(variables, *args, **kwargs)`.

    Args:
        loss_fn, has_aux: as in `value_and_grad`.
        variables, args, kwargs: arguments of the loss; on one of many devices, its shards.
        shardings: the `GradSharding` of each parameter; a tree like the parameters.
        divisor: the loss is divided by it.
    """
    is_flax = has_params(variables)
    collections = variables if is_flax else {PARAMS: variables}
    others = {name: tree for name, tree in collections.items() if name not in (PARAMS, SCALING)}
    flat, treedef = jax.tree.flatten_with_path(collections[PARAMS], is_leaf=is_scaled)
    shards = treedef.flatten_up_to(shardings)
    params = [_Param(*pair, sharding.shard) for pair, sharding in zip(flat, shards, strict=True)]
    state = to_fm32(collections.get(SCALING, {}))
    rest, rest_treedef = jax.tree.flatten((others, args, kwargs))
    arrays = [x for x in rest if is_array(x)]

    def call(leaves: list[Any], state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        given = iter(arrays)
        others, args, kwargs = rest_treedef.unflatten([next(given) if is_array(x) else x for x in rest])
        inside = treedef.unflatten(leaves)
        if is_flax:
            inside = {**others, PARAMS: inside, **({SCALING: state} if SCALING in variables else {})}
        out = loss_fn(inside, *args, **kwargs)
        value, aux = out if has_aux else (out, None)
        return (value / divisor if divisor > 1 else value), aux

    trace = _trace(call, params, state, arrays)
    slots = [
        grad_slot(each.leaf, each.shard, state_at(state, each.path), trace.uses.get(each.names))
        for each in params
    ]
    is_own = [slot is each.leaf for slot, each in zip(slots, params, strict=True)]

    def loss(slots: list[Any], state: Any) -> tuple[Any, Any]:
        ins = [_input(*each) for each in zip(params, slots, trace.ways, is_own, strict=True)]
        inputs = [*ins, *jax.tree.leaves(state), *arrays]
        return trace.out_tree.unflatten(evaluate(trace.context, trace.jaxpr, trace.consts, inputs, {}))

    # allow_int, because `jax.grad` does not accept the extended dtypes of slots and state as floats.
    grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    (value, aux), (grads, new_state) = grad_fn(slots, state)
    return Gradient((value, aux) if has_aux else value, treedef.unflatten(grads), new_state)


def _trace(call: Callable[..., Any], params: list[_Param], state: Any, arrays: list[Any]) -> _Trace:
    """Traces `call(leaves, state, arrays)` with plain parameters."""
    with plain_parameters():
        made = jax.make_jaxpr(call, return_shape=True)([each.aval for each in params], state, arrays)
    closed, shapes = made
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    ways = [each.way for each in params]
    found = find(jaxpr, ways)
    context = Context(Plan.of((), found.programs), "auto")
    return _Trace(jaxpr, closed.consts, jax.tree.structure(shapes), ways, found.uses, context)


def _input(param: _Param, slot: Any, way: Way | None, is_own: bool) -> Any:
    """A parameter as an input of `evaluate`; its gradient is that of `slot`, which may be the parameter."""
    if way is None:
        return slot
    return Tracked(slot, None, way) if is_own else Tracked(param.leaf, slot, way, param.shard)
