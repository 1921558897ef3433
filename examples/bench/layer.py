"""The transformer layer that the benchmarks measure, with the sizes of TransformerEngine's published figures.

    model = stack(ways.WAYS["bf16"], count=1)        # (sequences, time, 4096) -> the same

A layer norm before each half, causal attention, a gelu MLP four times as wide. A way (see ways.py) computes
the four dense layers; attention's GEMMs stay in the model's dtype.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import ways

# hidden 4096, ffn 16384, 15872 tokens
WIDTH, HEADS, SEQUENCES, TIME = 4096, 32, 31, 512


class Layer(nn.Module):
    """A decoder layer."""

    dense: Callable[..., nn.Module]
    dtype: Any
    heads: int = HEADS
    attention: Any = "xla"  # implementation of `jax.nn.dot_product_attention`

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x, shape=(sequences, time, width), to the same shape."""
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
        """Maps x, shape=(sequences, time, width), to the same shape."""
        for index in range(self.count):
            x = self.layer(name=f"layer_{index}")(x)
        return x


@functools.cache
def attention() -> str:
    """cuDNN's attention if it can run here; else XLA's, and a line that says why."""
    if jax.default_backend() != "gpu":
        return "xla"
    x = jax.numpy.ones((1, 128, 2, 64), jax.numpy.bfloat16)
    try:
        jax.block_until_ready(jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn"))
    except Exception as error:  # of cuDNN, which is compared with nothing here
        print(f"without cuDNN's attention: {error}"[:500], file=sys.stderr)
        return "xla"
    return "cudnn"


def stack(way: ways.Way, count: int = 1, heads: int = HEADS, attention: str = "xla") -> Layers:
    """Layers computed in a way."""
    return Layers(functools.partial(Layer, way.dense, way.dtype, heads, attention), count)
