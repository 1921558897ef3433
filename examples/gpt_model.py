"""A GPT in Linen: the model that train_gpt.py trains.

    logits = GPT(GPTConfig(vocabulary=65)).apply(variables, tokens)    # (batch, time) -> (batch, time, 65)

GPT-2's decoder: learned positions, layer norm before each half of a block, causal attention, a gelu MLP four
times as wide. This file has no FP8: `fp8jax.transform` runs the four linear layers of a block, and an untied
head if not excluded, in the recipe's formats.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

INIT = nn.initializers.normal(0.02)
LINEAR = "linear"  # names the outputs of the linear layers for `nn.remat`


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT; the defaults are nanoGPT's for training on a CPU."""

    vocabulary: int
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    bias: bool = False
    tied: bool = False  # whether the head is the embedding's transpose
    dtype: str = "float32"  # of activations between GEMMs
    scan: bool = True  # one compiled block, with parameters stacked along axis 0; else blocks h_0, h_1, ...
    remat: bool = True  # save only the outputs of the linear layers, and recompute the rest in the backward
    policy: Any = None  # of rematerialization, instead of that one
    # The one of this file, or "xla" or "cudnn" of `jax.nn.dot_product_attention`; "cached" for generate.py.
    attention: str = "plain"

    def __post_init__(self) -> None:
        if self.attention not in ("plain", "xla", "cudnn", "cached"):
            raise ValueError(
                f"`attention`: expected one of plain, xla, cudnn, cached; got {self.attention!r}"
            )
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} is no multiple of --heads {self.heads}; change one")


class Attention(nn.Module):
    """Causal self-attention."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same."""
        batch, time, width = x.shape
        heads = self.config.heads
        # One GEMM for query, key and value.
        qkv = linear(self.config, x, 3 * width, "c_attn")
        qkv = qkv.reshape(batch, time, 3, heads, width // heads)
        chosen: Any = self.config.attention
        if chosen == "plain":
            y = attend(qkv)
        elif chosen == "cached":
            y = attend_cached(self, qkv)
        else:
            query, key, value = (qkv[:, :, i] for i in range(3))
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=chosen)
        return linear(self.config, y.reshape(x.shape), width, "c_proj", residual=True)


def attend(qkv: jax.Array) -> jax.Array:
    """(batch, time, 3, heads, channel) -> (batch, time, heads, channel), each time looking back."""
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)
    scores = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
    scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores.astype(jnp.float32), -jnp.inf)
    return (nn.softmax(scores).astype(qkv.dtype) @ value).transpose(0, 2, 1, 3)


def attend_cached(module: Attention, qkv: jax.Array) -> jax.Array:
    """The same for the next times of a sequence, which attend also to the times in the collection "cache"."""
    batch, time, _, heads, channels = qkv.shape
    shape = batch, module.config.context, 2, heads, channels
    kept = module.variable("cache", "key_value", jnp.zeros, shape, qkv.dtype)
    start = next_times(module, time)
    kept.value = jax.lax.dynamic_update_slice(kept.value, qkv[:, :, 1:], (0, start, 0, 0, 0))
    mask = start + jnp.arange(time)[:, None] >= jnp.arange(module.config.context)[None]
    key, value = kept.value[:, :, 0], kept.value[:, :, 1]
    return jax.nn.dot_product_attention(qkv[:, :, 0], key, value, mask=mask[None, None])


def next_times(module: nn.Module, time: int) -> jax.Array:
    """The number of times before these `time` ones, which the collection "cache" counts."""
    seen = module.variable("cache", "times", jnp.zeros, (), jnp.int32)
    seen.value += time
    return seen.value - time


class MLP(nn.Module):
    """Two linear layers around a gelu."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same."""
        width = x.shape[-1]
        x = nn.gelu(linear(self.config, x, 4 * width, "c_fc"))  # with GPT-2's tanh, not erf
        return linear(self.config, x, width, "c_proj", residual=True)


class Block(nn.Module):
    """A transformer block: attention, then the MLP, each with a residual connection."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """(batch, time, width) -> the same, as the carry of a scan."""
        x = x + Attention(self.config, name="attn")(norm(self.config, "ln_1")(x))
        x = x + MLP(self.config, name="mlp")(norm(self.config, "ln_2")(x))
        return x, None


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, time) int -> (batch, time, vocabulary)."""
        config, time = self.config, tokens.shape[1]
        wte = nn.Embed(config.vocabulary, config.width, dtype=config.dtype, embedding_init=INIT, name="wte")
        wpe = nn.Embed(config.context, config.width, dtype=config.dtype, embedding_init=INIT, name="wpe")
        x, times = wte(tokens), jnp.arange(time)[None]
        if config.attention == "cached":
            times += next_times(self, time)
        x += wpe(times)
        keep = config.policy or jax.checkpoint_policies.save_only_these_names(LINEAR)
        # Outside of a scan, XLA would undo the recomputation.
        prevent = not config.scan
        block = nn.remat(Block, prevent_cse=prevent, policy=keep) if config.remat else Block
        if config.scan:
            axes: Any = {"params": 0, "cache": 0}
            scanned = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=config.layers)
            x, _ = scanned(config, name="h")(x, None)
        else:
            for number in range(config.layers):
                x, _ = block(config, name=f"h_{number}")(x, None)
        x = norm(config, "ln_f")(x)
        if config.tied:
            return wte.attend(x)
        return nn.Dense(
            config.vocabulary, use_bias=False, dtype=config.dtype, kernel_init=INIT, name="lm_head"
        )(x)


def linear(config: GPTConfig, x: jax.Array, features: int, name: str, *, residual: bool = False) -> jax.Array:
    """A linear layer; its output is named for rematerialization."""
    # GPT-2's: two layers per block add to the residual stream, and share the variance of one.
    share = 1 / (2 * config.layers) if residual else 1.0
    init = nn.initializers.normal(0.02 * share**0.5)
    layer = nn.Dense(features, use_bias=config.bias, dtype=config.dtype, kernel_init=init, name=name)
    return checkpoint_name(layer(x), LINEAR)


def norm(config: GPTConfig, name: str) -> nn.LayerNorm:
    """A layer norm, with a bias if the linear layers have one."""
    return nn.LayerNorm(epsilon=1e-5, use_bias=config.bias, dtype=config.dtype, name=name)
