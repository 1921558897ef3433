"""Gradients of a loss that is traced with plain parameters and evaluated with the stored kernels.

The loss sees arrays in the parameters' original dtypes. A kernel with one FP8 dot product and no other use
has an FP8 gradient. If a kernel has other uses (a second dot product, weight decay in the loss), its
gradients are summed in float32 and quantized afterwards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from fp8jax.comm.zero import own_part
from fp8jax.gradients.states import state_at
from fp8jax.quantization import is_scaled
from fp8jax.rewrite import (
    Context,
    Plan,
    Tracked,
    Way,
    aval_of,
    evaluate,
    find,
    is_array,
    is_followed,
    names_of,
    plain_parameters,
)
from fp8jax.scaling.merge import to_fm32, zero_fp8_grad
from fp8jax.variables import PARAMS, SCALING, has_params


class Gradient(NamedTuple):
    """A loss and its gradients, before `narrowed`."""

    out: Any  # the loss, or the loss and auxiliary outputs
    grads: Any  # tree like the parameters: float arrays, or `FP8_GRAD` codes with their scale in the state
    state: Any  # the state's cotangents, dtype `fm32`


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
    params = variables[PARAMS] if is_flax else variables
    state = to_fm32(variables.get(SCALING, {}) if is_flax else {})
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    shards = [sharding.shard for sharding in treedef.flatten_up_to(shardings)]
    rows = [(path, leaf, shard) for (path, leaf), shard in zip(flat, shards, strict=True)]
    others = {}
    if is_flax:
        others = {name: tree for name, tree in variables.items() if name not in (PARAMS, SCALING)}
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

    def way(path: Any, leaf: Any, shard: Any) -> Way | None:
        shape = leaf.shape if shard is None else shard.whole_shape(leaf.shape)
        is_kernel = is_followed(leaf) or shard is not None
        return Way.of(names_of(path), shape, aval_of(leaf).dtype) if is_kernel else None

    ways = [way(*row) for row in rows]
    avals = [
        aval_of(leaf) if shard is None or way is None else jax.ShapeDtypeStruct(way.shape, way.dtypes[0])
        for (_, leaf, shard), way in zip(rows, ways, strict=True)
    ]
    with plain_parameters():
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(avals, state, arrays)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    found = find(jaxpr, ways)
    context = Context(Plan.of((), found.programs), "auto")

    def grad_slot(path: Any, leaf: Any, shard: Any) -> Any:
        is_marked = "wgrad_scale" in state_at(state, path)
        if not (is_marked or is_scaled(leaf) or shard is not None):
            return leaf
        like, uses = leaf.data if is_scaled(leaf) else leaf, found.uses.get(names_of(path))
        if shard is not None and not shard.is_part:
            like = own_part(like, shard.axis, shard.axis_name)
        is_alone = uses is not None and uses.dots == 1 and not uses.others and not uses.is_shared
        return zero_fp8_grad(like) if is_marked and is_alone else jnp.zeros_like(like, jnp.float32)

    def loss(grad_slots: list[Any], state: Any) -> tuple[Any, Any]:
        def enter(row: Any, grad_slot: Any, way: Way | None, is_own: bool) -> Any:
            if way is None:
                return grad_slot
            return Tracked(grad_slot, None, way) if is_own else Tracked(row[1], grad_slot, way, row[2])

        ins = [enter(*each) for each in zip(rows, grad_slots, ways, is_own, strict=True)]
        outs = evaluate(context, jaxpr, closed.consts, [*ins, *jax.tree.leaves(state), *arrays], {})
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    grad_slots = [grad_slot(*row) for row in rows]
    is_own = [row[1] is grad_slot for row, grad_slot in zip(rows, grad_slots, strict=True)]
    # allow_int, because `jax.grad` does not accept the extended dtypes of slots and state as floats.
    grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    (value, aux), (grads, new_state) = grad_fn(grad_slots, state)
    return Gradient((value, aux) if has_aux else value, treedef.unflatten(grads), new_state)
