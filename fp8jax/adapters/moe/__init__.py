"""Mixture of experts: a router sends each token to `top_k` of many feed-forward layers.

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + moe.linen.MoE(hidden_features=256, num_experts=8)(nn.LayerNorm()(x))

    out, sown = model.apply(variables, x, mutable=["intermediates"])
    loss = loss_of(out) + moe.auxiliary_loss(sown)

`moe.linen.MoE` is a plain Flax Linen layer, `moe.nnx.MoE` a plain NNX layer; both run without a recipe. Under
`fp8jax.transform` the experts' GEMMs run in FP8, forward and backward, with a scale for each expert's kernel,
its rows and their gradients. The router stays in float32. `exchange` sorts tokens by expert, and `ragged_dot`
multiplies them. Experts have no capacity, so no token is dropped.

References:
    GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961; ST-MoE, arXiv 2202.08906;
    MegaBlocks, arXiv 2211.15841; Mixtral of Experts, arXiv 2401.04088.
"""

from fp8jax.adapters.moe import linen as linen
from fp8jax.adapters.moe import nnx as nnx
from fp8jax.adapters.moe.routing import Route as Route
from fp8jax.adapters.moe.routing import auxiliary_loss as auxiliary_loss
from fp8jax.adapters.moe.routing import route as route
