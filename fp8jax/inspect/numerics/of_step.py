"""`step_statistics`: what the formats of an optimizer's state and of the weights take from one step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, PyTree

from fp8jax.optim.state import is_adam_state, is_masked
from fp8jax.optim.step.weight_rounding import decode_weight
from fp8jax.optim.storage import Storage, is_stored
from fp8jax.optim.wrappers import without_variables
from fp8jax.quantization import is_scaled, plain, value
from fp8jax.rewrite import names_of
from fp8jax.variables import params_of


class StepRow(NamedTuple):
    """Shares of one parameter's entries, float32, shape=(); NaN where there is no such entry or moment."""

    lost: Float32[Array, ""]  # of the entries with an update: no stored bit of the weight changed
    first_underflow: Float32[Array, ""]  # of the entries with a gradient: the first moment is zero
    second_underflow: Float32[Array, ""]  # of the entries with a gradient: the second moment is zero


def step_statistics(
    grads: PyTree, before: tuple[PyTree, PyTree], after: tuple[PyTree, PyTree]
) -> dict[str, StepRow]:
    """Updates lost to rounding, and moments that underflow, in one step of an optimizer.

        rows = fp8jax.inspect.numerics.step_statistics(grads, (params, opt_state), (new_params, new_state))

    A gradient that is not zero makes both moments and the update nonzero, up to rounding; without a gradient
    an update comes from a first moment that is not zero. The stored weight is the weight, and with it the
    master weight and the byte of `rounding="kahan"`, where there are any. So a weight whose byte changed is
    not lost. Moments are known where one Adam of `fp8jax.optim` updates the parameter, also in an
    `optax.partition`.

    Args:
        grads: the gradients, a tree like the parameters.
        before: the parameters, or whole variables, and the optimizer's state before the step.
        after: the same after the step.

    Returns:
        A row for each parameter, by its path. The function may be compiled.
    """
    flat, treedef = jax.tree.flatten_with_path(params_of(before[0]), is_leaf=is_scaled)
    of_grads = treedef.flatten_up_to(params_of(grads))
    old, new = (stored_params(params_of(params), state) for params, state in (before, after))
    rows = {}
    paths = names_of([path for path, _ in flat])
    for path, grad, was, now in zip(paths, of_grads, old, new, strict=True):
        has_grad = jnp.asarray(value(plain(grad)), jnp.float32) != 0
        is_zero = [None if moment is None else _codes(moment) == 0 for moment in (now.first, now.second)]
        moves = has_grad if is_zero[0] is None else has_grad | ~is_zero[0]
        rows["/".join(path)] = StepRow(
            _share(decode_weight(*was[:2]) == decode_weight(*now[:2]), moves),
            *(jnp.float32(jnp.nan) if zero is None else _share(zero, has_grad) for zero in is_zero),
        )
    return rows


class StoredParam(NamedTuple):
    """The stored arrays of one parameter; None for those that it does not have."""

    weight: Any  # the master weight if there is one
    remainder: Any
    first: Any  # moment
    second: Any


def stored_params(params: PyTree, opt_state: PyTree) -> list[StoredParam]:
    """The stored arrays of each parameter: the weight alone, unless one state of Adam has the parameter."""
    leaves, opt_state = jax.tree.leaves(params, is_leaf=is_scaled), without_variables(opt_state)

    def parts(tree: PyTree) -> list[Any]:
        nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_stored)
        # None, or a mask, stands for a parameter or for a subtree of them.
        below = [jax.tree.leaves(x, is_leaf=is_scaled) for x in treedef.flatten_up_to(params)]
        return [node for node, each in zip(nodes, below, strict=True) for _ in each]

    adams = [node for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state) if is_adam_state(node)]
    trees = [(each.master, each.remainder, each.adam.mu, each.adam.nu) for each in adams]
    states = [zip(*map(parts, each), strict=True) for each in trees]
    stored = []
    for leaf, *found in zip(leaves, *states, strict=True):
        found = [each for each in found if not any(map(is_masked, each))]
        master, *others = found[0] if len(found) == 1 else [None] * 4
        stored.append(StoredParam(leaf if master is None else master, *others))
    return stored


def _is_stored(node: Any) -> bool:
    return node is None or is_masked(node) or is_stored(node)


def _codes(moment: Any) -> jax.Array:
    """The codes of a moment, as floats; its value for a storage without one array of codes."""
    scaled = moment.scaled if isinstance(moment, Storage) else moment
    return scaled.data.astype(jnp.float32) if is_scaled(scaled) else jnp.asarray(moment, jnp.float32)


def _share(of: jax.Array, among: jax.Array) -> jax.Array:
    """The share of `of` among other entries; NaN without such entries."""
    return jnp.sum(of & among, dtype=jnp.int32) / jnp.sum(among, dtype=jnp.int32)
