"""Mixture of experts: a router gives each token to `top_k` of many feed-forward layers.

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + moe.linen.MoE(hidden_features=256, num_experts=8)(nn.LayerNorm()(x))

    out, sown = model.apply(variables, x, mutable=["intermediates"])
    loss = loss_of(out) + moe.auxiliary_loss(sown)

It is plain Flax, Linen (`moe.linen.MoE`) or NNX (`moe.nnx.MoE`), and runs without a recipe. Under
`fp8jax.transform` the experts' products run in FP8, forward and backward, with a scale for each expert's
kernel, its rows and their gradients; the router stays in float32. Tokens are sorted by expert
(`exchange`) and multiplied by `ragged_dot`: no expert has a capacity, and no token is dropped.

References:
    GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961; ST-MoE, arXiv 2202.08906;
    MegaBlocks, arXiv 2211.15841; Mixtral of Experts, arXiv 2401.04088.
"""

from typing import Any

import jax
from flax import nnx as _nnx

from fp8jax.adapters.moe import linen as linen
from fp8jax.adapters.moe import nnx as nnx
from fp8jax.adapters.moe.routing import Route as Route
from fp8jax.adapters.moe.routing import collected, weighted_sum
from fp8jax.adapters.moe.routing import route as route


def auxiliary_loss(model: Any, *, load_balance: float = 1e-2, router_z: float = 1e-3) -> jax.Array:
    """What the routers add to a loss: the sum of their losses over all layers, each with its weight.

    Args:
        model: an NNX module after its call; or what Linen's `apply(..., mutable=["intermediates"])`
            gave beside the output.
        load_balance: weight of `load_balance_loss`; Switch has 1e-2.
        router_z: weight of `router_z_loss`; ST-MoE has 1e-3.

    Returns:
        float32, shape ().

    Raises:
        ValueError: there are no such losses.
    """
    found = nnx.losses_of(model) if isinstance(model, _nnx.Module) else collected(model)
    if not all(found.values()):
        raise ValueError(
            "`model`: expected an NNX module with MoE layers, or the 'intermediates' of a Linen model with "
            "some; got none. Give `apply` mutable=['intermediates'], and under `nn.scan` that collection an "
            "axis."
        )
    return weighted_sum(found, load_balance, router_z)
