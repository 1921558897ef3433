"""Models to look at a recipe with: what transformers have, and nothing else.

Block(256)                                      # of a chart
GPT(vocabulary=50304, **GPTS["gpt-7b"])         # of a plan
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fp8jax.adapters.moe.linen import MoE
from fp8jax.adapters.nnx import transform
from fp8jax.adapters.nnx.gradient import KINDS, put_in, tree_of
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Settings
from fp8jax.variables import PARAMS, SCALING

# GPT-3's sizes (arXiv 2005.14165, table 2.1), as FP8-LM has them.
GPTS: dict[str, dict[str, int]] = {
    "gpt-125m": {"layers": 12, "width": 768, "heads": 12, "context": 2048},
    "gpt-350m": {"layers": 24, "width": 1024, "heads": 16, "context": 2048},
    "gpt-7b": {"layers": 32, "width": 4096, "heads": 32, "context": 2048},
    "gpt-13b": {"layers": 40, "width": 5120, "heads": 40, "context": 2048},
    "gpt-175b": {"layers": 96, "width": 12288, "heads": 96, "context": 2048},
}

_PRODUCT = "product"


class Block(nn.Module):
    """Layer norm, a dense layer four times as wide, gelu, a dense layer back, residual."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(tokens, width) -> the same."""
        y = nn.LayerNorm(dtype=x.dtype)(x)
        y = nn.gelu(nn.Dense(4 * self.width, name="up", dtype=x.dtype)(y))
        return x + nn.Dense(self.width, name="down", dtype=x.dtype)(y)


class _Layer(nn.Module):
    """A decoder's."""

    heads: int
    bias: bool
    experts: int
    top_k: int

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """(batch, time, width) -> the same, as the carry of a scan."""
        (batch, time, width), heads = x.shape, self.heads
        qkv = self.dense(3 * width, "qkv", self.norm("norm_1", x))
        query, key, value = qkv.reshape(batch, time, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        scores = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
        scores = jnp.where(jnp.tri(time, dtype=bool), scores.astype(jnp.float32), -jnp.inf)
        y = (nn.softmax(scores).astype(x.dtype) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + self.dense(width, "out", y)
        y = self.norm("norm_2", x)
        if self.experts:
            mixed = MoE(4 * width, self.experts, self.top_k, dtype=x.dtype, name="experts")(y)
            return x + checkpoint_name(mixed, _PRODUCT), None
        return x + self.dense(width, "down", nn.gelu(self.dense(4 * width, "up", y))), None

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(epsilon=1e-5, use_bias=self.bias, dtype=x.dtype, name=name)(x)

    def dense(self, features: int, name: str, x: jax.Array) -> jax.Array:
        layer = nn.Dense(features, use_bias=self.bias, dtype=x.dtype, name=name)
        return checkpoint_name(layer(x), _PRODUCT)


class GPT(nn.Module):
    """A GPT-2; by default its layers are scanned, with the bytes and FLOPs of `examples/gpt_model.py`'s."""

    vocabulary: int
    layers: int
    heads: int
    width: int
    context: int
    dtype: Any = jnp.bfloat16
    remat: bool = True  # keep only the products for the backward
    bias: bool = False
    experts: int = 0  # of each layer, in the place of its MLP; 0: none
    top_k: int = 2  # experts of a token
    scan: bool = True  # one layer's code for all; else a layer after the other

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, time) int -> (batch, time, vocabulary) logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="tokens")(tokens)
        positions = nn.Embed(self.context, self.width, dtype=self.dtype, name="positions")
        x = x + positions(jnp.arange(tokens.shape[1])[None])
        keep = jax.checkpoint_policies.save_only_these_names(_PRODUCT)
        layer = nn.remat(_Layer, prevent_cse=not self.scan, policy=keep) if self.remat else _Layer
        config = (self.heads, self.bias, self.experts, self.top_k)
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(layer, length=self.layers, **axes)(*config, name="layers")(x, None)
        for i in range(0 if self.scan else self.layers):
            x, _ = layer(*config, name=f"layer_{i}")(x, None)
        x = nn.LayerNorm(epsilon=1e-5, use_bias=self.bias, dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype, name="lm_head")(x)


def loss_of_module(
    model: nnx.Module, recipe: Recipe, loss: Callable[..., Any]
) -> tuple[Callable[..., Any], Any]:
    """`loss(model(*batch), *batch)` of an NNX module under a recipe: a function of variables and a batch, and
    the shapes of the variables."""
    return loss_of_transformed(under(model, recipe), loss)


def under(model: nnx.Module, recipe: Recipe) -> nnx.Module:
    """The shapes of an NNX module under a recipe."""
    return nnx.eval_shape(lambda model: transform(model, Settings(recipe)), model)


def loss_of_transformed(model: nnx.Module, loss: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """`loss_of_module` of what `under` gives."""
    graph, params, states, *others = nnx.split(model, *KINDS)

    def loss_fn(variables: Any, *batch: Any) -> Any:
        arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)
        inside = put_in(params, variables[PARAMS]), put_in(states, variables[SCALING]), *arrays
        merged: Any = nnx.merge(graph, *inside)
        return loss(merged(*batch), *batch)

    return loss_fn, {PARAMS: tree_of(params), SCALING: tree_of(states)}
