"""The state of an Adam, and what can be asked of any optimizer state that has one in it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdamState(NamedTuple):
    """State of `adam`, `adamw`, `adamw_8bit` and `scale_by_adam`.

    The leaves of mu and nu are `ScaledArray`s with as many scales as the parameter has,
    `Blockwise` (of `adamw_8bit`) or float32 arrays. A master leaf stands where the parameter itself is too
    coarse to train.
    """

    adam: optax.ScaleByAdamState  # (count, mu, nu); count is that of the steps taken
    master: Any  # tree like the parameters: ScaledArray or float32 array, None where there is none
    skipped: jax.Array  # shape=(), int32: steps not taken because something in them was not finite


class ValuesState(NamedTuple):
    """State of `on_values`."""

    inner: Any  # of the optimizer within
    skipped: jax.Array  # as in `AdamState`


def moments(state: Any) -> tuple[Any, Any]:
    """The trees of first and second moments in an optimizer state, however deep.

    Raises:
        ValueError: the state holds no Adam moments, or more than one pair.
    """

    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    found = [node for node in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(node)]
    if len(found) != 1:
        raise ValueError(
            f"`state`: expected an optimizer state with one pair of Adam moments; got {len(found)}."
        )
    return found[0].mu, found[0].nu


def skipped(state: Any) -> jax.Array:
    """How many steps an optimizer state has skipped, summed over the optimizers in it that count them; int32,
    shape ()."""

    def counts(node: Any) -> bool:
        return isinstance(node, AdamState | ValuesState)

    states = [node for node in jax.tree.leaves(state, is_leaf=counts) if counts(node)]
    return sum((node.skipped for node in states), jnp.zeros((), jnp.int32))


def is_adam_state(node: Any) -> bool:
    """Whether a node of a tree is an `AdamState`."""
    return isinstance(node, AdamState)
