"""The transformer layer that the benchmarks measure, as TransformerEngine's published figures have it.

    layer = Layer(dense=nn.Dense, dtype=jnp.bfloat16)        # (sequences, time, 4096) -> the same

A layer norm before each half, causal attention between one product for queries, keys and values and one back,
a gelu MLP. Its four dense layers come from outside (see ways.py); attention's own products stay in its dtype.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

# hidden 4096, ffn 16384, 15872 tokens
WIDTH, HEADS, SEQUENCES, TIME = 4096, 32, 31, 512


class Layer(nn.Module):
    """A decoder's layer; the MLP is four times as wide."""

    dense: Callable[..., nn.Module]
    dtype: Any
    heads: int = HEADS
    attention: Any = "xla"  # an implementation of `jax.nn.dot_product_attention`

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(sequences, time, width) -> the same."""
        sequences, time, width = x.shape
        y = nn.LayerNorm(dtype=self.dtype, name="norm_1")(x)
        qkv = self.dense(3 * width, name="qkv")(y)
        qkv = qkv.reshape(sequences, time, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i] for i in range(3))
        with jax.named_scope("attention"):
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=self.attention)
        x = x + self.dense(width, name="out")(y.reshape(x.shape))
        y = nn.LayerNorm(dtype=self.dtype, name="norm_2")(x)
        y = nn.gelu(self.dense(4 * width, name="up")(y))
        return x + self.dense(width, name="down")(y)


class Layers(nn.Module):
    """Layers in a row."""

    layer: Callable[..., Layer]
    count: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(sequences, time, width) -> the same."""
        for index in range(self.count):
            x = self.layer(name=f"layer_{index}")(x)
        return x
