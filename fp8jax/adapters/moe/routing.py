"""Which experts get a token, and the losses that keep a router balanced and its logits small.

    >>> import jax.numpy as jnp
    >>> from fp8jax.adapters.moe.routing import route
    >>> logits = jnp.array([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    >>> chosen = route(logits, 2)
    >>> chosen.experts.tolist()
    [[0, 1], [2, 0]]
    >>> [[round(float(gate), 2) for gate in gates] for gates in chosen.gates]
    [[0.73, 0.27], [0.95, 0.05]]

References:
    GShard, arXiv 2006.16668, section 2.2; Switch Transformers, arXiv 2101.03961, section 2.2, equations 4
    to 6 (the loss for balance); ST-MoE, arXiv 2202.08906, section 3, equation 5 (the loss of logits);
    Mixtral of Experts, arXiv 2401.04088, section 2.1 (gates over the chosen experts).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOAD_BALANCE, ROUTER_Z = LOSSES = ("load_balance_loss", "router_z_loss")


class Route(NamedTuple):
    """The experts of each token."""

    experts: jax.Array  # shape=(tokens, top_k), int32
    gates: jax.Array  # shape=(tokens, top_k), float32: what their outputs are multiplied with
    load: jax.Array  # shape=(experts,), float32: each one's part of all choices
    load_balance_loss: jax.Array  # shape=(), float32
    router_z_loss: jax.Array  # shape=(), float32


def route(logits: jax.Array, top_k: int) -> Route:
    """The `top_k` experts of each token by the router's logits, computed in float32.

    With the probabilities `p = softmax(logits)` the gates are those of the chosen experts divided by their
    sum, as in Mixtral; with `top_k=1` the probability itself, as in Switch, or the router would have no
    gradient.

    * `load_balance_loss`: `experts * sum(load * mean(p, axis=0))`, where `load` is each expert's part of
      all choices and has no gradient. 1 where both are uniform, which is its minimum over routers whose
      choices follow their probabilities; `experts / top_k` where all tokens go to the same experts.
    * `router_z_loss`: `mean(logsumexp(logits)**2)`.

    Args:
        logits: float array, shape=(tokens, experts).
        top_k: experts of a token.

    Raises:
        ValueError: `top_k` is not between 1 and the number of experts.
    """
    tokens, experts = logits.shape
    check(experts, top_k)
    logits = logits.astype(jnp.float32)
    p = jax.nn.softmax(logits)
    gates, chosen = jax.lax.top_k(p, top_k)
    if top_k > 1:
        gates = gates / jnp.sum(gates, axis=1, keepdims=True)
    counts = jnp.zeros(experts, jnp.float32).at[chosen.reshape(-1)].add(1.0)
    load = counts / max(tokens * top_k, 1)
    balance = experts * jnp.sum(load * jnp.mean(p, axis=0))
    z = jnp.mean(jax.nn.logsumexp(logits, axis=1) ** 2)
    return Route(chosen.astype(jnp.int32), gates, load, balance, z)


def check(num_experts: int, top_k: int) -> None:
    """Raises ValueError if no router can choose so many of the experts."""
    if num_experts < 1:
        raise ValueError(f"`num_experts`: expected a positive number; got {num_experts}.")
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"`top_k`: expected 1 to {num_experts}, the number of experts; got {top_k}: a token goes to an "
            "expert once."
        )


def weighted_sum(found: Mapping[str, list[Any]], load_balance: float, router_z: float) -> jax.Array:
    """The losses of all layers, each kind with its weight."""
    kinds = ((LOAD_BALANCE, load_balance), (ROUTER_Z, router_z))
    terms = [weight * jnp.sum(loss) for name, weight in kinds for loss in found[name]]
    return sum(terms, jnp.zeros((), jnp.float32))


def collected(tree: Any) -> dict[str, list[Any]]:
    """The losses in a tree of mappings, as `sow` leaves them."""
    found: dict[str, list[Any]] = {name: [] for name in LOSSES}
    for name, losses in _entries(tree):
        found[name] += jax.tree.leaves(losses)
    return found


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    for name, below in tree.items():
        if name in LOSSES:
            yield name, below
        elif isinstance(below, Mapping):
            yield from _entries(below)
