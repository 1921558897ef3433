"""The gradient of a loss, traced with plain parameters and evaluated with each kernel as it is stored.

The loss sees arrays of the parameters' own dtypes. A kernel that one FP8 dot product takes has a gradient of
FP8 codes; where something else reads it too (a second dot product, weight decay in the loss), its gradients
are added in float32, to be narrowed after.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.gradients.states import state_at
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
from fp8jax.scaled import is_scaled
from fp8jax.scaling.merge import no_codes, to_max
from fp8jax.variables import PARAMS, SCALING, has_params


class Gradient(NamedTuple):
    """A loss and its gradients, not yet narrowed."""

    out: Any  # the loss, or the loss and auxiliary outputs
    grads: Any  # tree like the parameters: float arrays, or `CODES` on the scale in the state
    state: Any  # as it left the backward, in float32's dtype of maxima


def gradient(loss_fn: Callable[..., Any], has_aux: bool, variables: Any, args: Any, kwargs: Any) -> Gradient:
    """`jax.value_and_grad(loss_fn)(variables, *args, **kwargs)`, where kernels are scaled or marked.

    Raises:
        LayersFound: the loss calls a model that multiplies by layers of its own.
    """
    is_flax = has_params(variables)
    params = variables[PARAMS] if is_flax else variables
    state = to_max(variables.get(SCALING, {}) if is_flax else {})
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    leaves, paths = [leaf for _, leaf in flat], [names_of(path) for path, _ in flat]
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
        return out if has_aux else (out, None)

    avals = [aval_of(leaf) for leaf in leaves]
    with plain_parameters():
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(avals, state, arrays)
    pairs = list(zip(paths, avals, strict=True))
    ways = [Way.of(path, x.shape, x.dtype) if is_followed(x) else None for path, x in pairs]
    states = jax.tree.leaves(state)
    found = find(closed.jaxpr, [*ways, *[None] * (len(states) + len(arrays))])
    context = Context(Plan.of((), found.programs), "auto")

    def slot(leaf: Any, path: Any) -> Any:
        is_marked = "wgrad_scale" in state_at(state, path)
        if not (is_marked or is_scaled(leaf)):
            return leaf
        data, uses = leaf.data if is_scaled(leaf) else leaf, found.uses.get(names_of(path))
        is_alone = uses is not None and uses.dots == 1 and not uses.others and not uses.is_shared
        return no_codes(data) if is_marked and is_alone else jnp.zeros_like(data, jnp.float32)

    def loss(slots: list[Any], state: Any) -> tuple[Any, Any]:
        def enter(leaf: Any, slot: Any, way: Way | None, is_own: bool) -> Any:
            if way is None:
                return slot
            return Tracked(slot, None, way) if is_own else Tracked(leaf, slot, way)

        ins = [enter(*each) for each in zip(leaves, slots, ways, is_own, strict=True)]
        outs = evaluate(context, closed.jaxpr, closed.consts, [*ins, *jax.tree.leaves(state), *arrays], {})
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    slots = [slot(leaf, path) for path, leaf in flat]
    is_own = [leaf is slot for leaf, slot in zip(leaves, slots, strict=True)]
    # The slots' and the state's dtypes, added in their own way, are no floats to `jax.grad`.
    grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    (value, aux), (grads, new_state) = grad_fn(slots, state)
    return Gradient((value, aux) if has_aux else value, treedef.unflatten(grads), new_state)


def is_marked(variables: Any) -> bool:
    """Whether a kernel is scaled, or has FP8 gradients."""
    params, states = variables, {}
    if has_params(variables):
        params, states = variables[PARAMS], variables.get(SCALING, {})
    names = {names_of(path)[-1] for path, _ in jax.tree.flatten_with_path(states)[0]}
    return "wgrad_scale" in names or any(map(is_scaled, jax.tree.leaves(params, is_leaf=is_scaled)))
