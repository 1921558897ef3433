"""The router's choice of experts for each token, and the losses that balance the experts.

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
    to 6 (the load balancing loss); ST-MoE, arXiv 2202.08906, section 3, equation 5 (the router z-loss);
    Mixtral of Experts, arXiv 2401.04088, section 2.1 (gates over the chosen experts).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int

LOSSES = ("load_balance_loss", "router_z_loss")


class Route(NamedTuple):
    """The experts of each token."""

    experts: Int[Array, "tokens top_k"]  # int32
    gates: Float[Array, "tokens top_k"]  # float32, the weights of the experts' outputs
    load: Float[Array, " experts"]  # float32, each expert's fraction of all choices
    load_balance_loss: Float[Array, ""]  # float32
    router_z_loss: Float[Array, ""]  # float32


def route(logits: Float[Array, "tokens experts"], top_k: int) -> Route:
    """The `top_k` experts of each token by the router's logits, computed in float32.

    With the probabilities `p = softmax(logits)`, the gates are those of the chosen experts divided by their
    sum, as in Mixtral. With `top_k=1` the gate is the probability itself, as in Switch, because a constant
    gate would give the router no gradient.

    * `load_balance_loss`: `experts * sum(load * mean(p, axis=0))`, where `load` has no gradient. It is 1 if
      load and probabilities are uniform, the minimum over routers with choices that follow their
      probabilities, and `experts / top_k` if all tokens go to the same experts.
    * `router_z_loss`: `mean(logsumexp(logits)**2)`.

    Both are 0 without tokens.

    Args:
        logits: the router's output.
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
    balance = experts * jnp.sum(load * (jnp.sum(p, axis=0) / max(tokens, 1)))
    z = jnp.sum(jax.nn.logsumexp(logits, axis=1) ** 2) / max(tokens, 1)
    return Route(chosen.astype(jnp.int32), gates, load, balance, z)


def check(num_experts: int, top_k: int) -> None:
    """Raises ValueError if a router cannot choose `top_k` experts."""
    if num_experts < 1:
        raise ValueError(f"`num_experts`: expected a positive number; got {num_experts}.")
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"`top_k`: expected 1 to {num_experts}, the number of experts; got {top_k}: a token goes to an "
            "expert once."
        )


def auxiliary_loss(
    model: nnx.Module | Mapping[str, Any], *, load_balance: float = 1e-2, router_z: float = 1e-3
) -> Float[Array, ""]:
    """The routers' part of a loss: the sum of their losses over all layers, each with its weight.

    Args:
        model: an NNX module after its call, or the collections that Linen's
            `apply(..., mutable=["intermediates"])` returns with the output.
        load_balance: weight of `load_balance_loss`; Switch has 1e-2.
        router_z: weight of `router_z_loss`; ST-MoE has 1e-3.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: there are no such losses.
    """
    is_nnx = isinstance(model, nnx.Module)
    sown = dict(nnx.to_flat_state(nnx.state(model))) if is_nnx else flatten_dict(dict(model))
    terms = [
        weight * jnp.sum(loss)
        for name, weight in zip(LOSSES, (load_balance, router_z), strict=True)
        for path, losses in sown.items()
        if name in path
        for loss in jax.tree.leaves(losses)
    ]
    if not terms:
        raise ValueError(
            "`model`: expected an NNX module with MoE layers, or the 'intermediates' of a Linen model with "
            "some; got none. Give `apply` mutable=['intermediates'], and under `nn.scan` that collection an "
            "axis."
        )
    return sum(terms, jnp.zeros((), jnp.float32))
