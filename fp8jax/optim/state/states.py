"""Optimizer states, and access to the moments and skipped steps in a chain's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp8jax.quantization.exported import tuple_stored_by_export


@tuple_stored_by_export
class AdamState(NamedTuple):
    """State of `adam`, `adamw`, `adamw_8bit` and `scale_by_adam`.

    The leaves of mu and nu are `ScaledArray`s with the parameter's scale blocks, `Root`s of them, `Blockwise`
    (`adamw_8bit`) or float32 arrays; `jnp.asarray` of each is its value. Parameters in the recipe's
    low-precision weight format have a master weight.
    """

    adam: optax.ScaleByAdamState  # (count, mu, nu); count is the number of steps taken
    master: Any  # tree like the parameters: ScaledArray or float32 array, None without a master weight
    skipped: jax.Array  # shape=(), int32: number of steps skipped because of inf or NaN
    # Of a recipe that rounds "kahan": a tree like the parameters of E4M3 codes in sixteenths of the scale of
    # the weight, or of the master weight; of int8 in 256ths of the last bit of a plain bfloat16 or float16
    # weight; None where there is none.
    remainder: Any = None
    key: Any = None  # shape=(2,), uint32: of a recipe that rounds stochastically


@tuple_stored_by_export
class DequantizedState(NamedTuple):
    """State of `with_dequantized`. The last three fields are None where no weight is rounded at random."""

    inner: Any  # state of the wrapped optimizer
    skipped: jax.Array  # as in `AdamState`
    remainder: Any = None  # as in `AdamState`
    key: Any = None  # as in `AdamState`
    count: Any = None  # shape=(), int32: number of steps taken


def moments(state: Any) -> tuple[Any, Any]:
    """The trees of first and second moments in an optimizer state, at any depth.

    Raises:
        ValueError: the state has no Adam moments, or more than one pair.
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
    """The number of skipped steps, summed over all optimizers in the state; int32, shape ()."""

    states = [node for node in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(node)]
    return sum((node.skipped for node in states), jnp.zeros((), jnp.int32))


def is_adam_state(node: Any) -> bool:
    """Whether a tree node is an `AdamState`."""
    return isinstance(node, AdamState)


def is_ours(node: Any) -> bool:
    """Whether a tree node is the state of an optimizer of this package."""
    return isinstance(node, AdamState | DequantizedState)


def is_masked(node: Any) -> bool:
    """Whether a tree node takes the place of a parameter that `optax.masked` or `partition` leaves out."""
    return isinstance(node, optax.MaskedNode)
