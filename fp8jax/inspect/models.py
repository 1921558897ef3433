"""Linen models to inspect a recipe with: a GPT, dense or of experts, and single layers.

    GPT(vocabulary=50304, **GPTS["gpt-7b"])
    LAYERS["mlp"](heads=32)

`GPTS` has sizes of GPTs by name, and `LAYERS` the classes of layers.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fp8jax.adapters.moe.linen import MoE

# GPT-3's sizes (arXiv 2005.14165, table 2.1), as in FP8-LM; Llama 3's (arXiv 2407.21783, table 3), with the
# context of the others.
_7B = {"layers": 32, "width": 4096, "heads": 32, "context": 2048}
GPTS: dict[str, dict[str, int]] = {
    "gpt-125m": {"layers": 12, "width": 768, "heads": 12, "context": 2048},
    "gpt-350m": {"layers": 24, "width": 1024, "heads": 16, "context": 2048},
    "gpt-7b": _7B,
    "gpt-13b": {"layers": 40, "width": 5120, "heads": 40, "context": 2048},
    "llama-8b": {**_7B, "kv_heads": 8, "gated": 14336, "vocabulary": 128256},
    "gpt-175b": {"layers": 96, "width": 12288, "heads": 96, "context": 2048},
}

_OUTPUT = "gemm_output"


class _Layer(nn.Module):
    """A decoder layer: attention, then an MLP or a mixture of experts."""

    heads: int
    kv_heads: int
    gated: int
    experts: int
    top_k: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch time width"], _: None
    ) -> tuple[Float[Array, "batch time width"], None]:
        """The layer's output, as the carry of a scan."""
        (batch, time, width), heads, kv = x.shape, self.heads, self.kv_heads or self.heads
        qkv = self.dense((heads + 2 * kv) * (width // heads), "qkv", self.norm("norm_1", x))
        if kv == heads:
            query, key, value = qkv.reshape(batch, time, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        else:
            qkv = qkv.reshape(batch, time, heads + 2 * kv, width // heads).transpose(0, 2, 1, 3)
            query, *others = jnp.split(qkv, (heads, heads + kv), axis=1)
            key, value = (jnp.repeat(each, heads // kv, axis=1) for each in others)
        scores = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
        scores = jnp.where(jnp.tri(time, dtype=bool), scores.astype(jnp.float32), -jnp.inf)
        y = (nn.softmax(scores).astype(x.dtype) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + self.dense(width, "out", y)
        y = self.norm("norm_2", x)
        if self.experts:
            mixed = MoE(4 * width, self.experts, self.top_k, dtype=x.dtype, name="experts")(y)
            return x + checkpoint_name(mixed, _OUTPUT), None
        if self.gated:
            gate, up = jnp.split(self.dense(2 * self.gated, "gate_up", y), 2, axis=-1)
            return x + self.dense(width, "down", nn.silu(gate) * up), None
        return x + self.dense(width, "down", nn.gelu(self.dense(4 * width, "up", y))), None

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(epsilon=1e-5, use_bias=False, dtype=x.dtype, name=name)(x)

    def dense(self, features: int, name: str, x: jax.Array) -> jax.Array:
        layer = nn.Dense(features, use_bias=False, dtype=x.dtype, name=name)
        return checkpoint_name(layer(x), _OUTPUT)


class GPT(nn.Module):
    """A GPT-2, with the bytes and FLOPs of the one in `examples/gpt_model.py`; with `gated` of a Llama."""

    vocabulary: int
    layers: int
    heads: int
    width: int
    context: int
    dtype: Any = jnp.bfloat16
    remat: bool = True  # the backward keeps only the outputs of GEMMs
    experts: int = 0  # in each layer, in place of the MLP; 0: none
    top_k: int = 2  # experts of a token
    kv_heads: int = 0  # of keys and values, as in Llama; 0: as many as queries
    gated: int = 0  # the width of a gated MLP, as in Llama; 0: an MLP of four times the width

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time vocabulary"]:
        """The logits of tokens."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="tokens")(tokens)
        positions = nn.Embed(self.context, self.width, dtype=self.dtype, name="positions")
        x = x + positions(jnp.arange(tokens.shape[1])[None])
        keep = jax.checkpoint_policies.save_only_these_names(_OUTPUT)
        layer = nn.remat(_Layer, prevent_cse=False, policy=keep) if self.remat else _Layer
        scanned = nn.scan(layer, length=self.layers, variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = scanned(self.heads, self.kv_heads, self.gated, self.experts, self.top_k, name="layers")(
            x, None
        )
        x = nn.LayerNorm(epsilon=1e-5, use_bias=False, dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype, name="lm_head")(x)


class TransformerLayer(nn.Module):
    """A decoder layer of `GPT`."""

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """Maps activations to activations."""
        return _Layer(self.heads, kv_heads=0, gated=0, experts=0, top_k=1, name="layer")(x, None)[0]


class MLP(nn.Module):
    """The second half of a decoder layer: its step has six GEMMs."""

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """Maps activations to activations."""
        y = nn.LayerNorm(epsilon=1e-5, use_bias=False, dtype=x.dtype, name="norm")(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], use_bias=False, dtype=x.dtype, name="up")(y))
        return x + nn.Dense(x.shape[-1], use_bias=False, dtype=x.dtype, name="down")(y)


class Dense(nn.Module):
    """The dense layers of a decoder layer in a row, nothing between them: its step has twelve GEMMs."""

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """Maps activations to activations."""
        width = x.shape[-1]
        x = x * self.param("scale", nn.initializers.ones, (width,), x.dtype)  # so that "qkv" has a dgrad, too
        for name, features in {"qkv": 3 * width, "out": width, "up": 4 * width, "down": width}.items():
            x = nn.Dense(features, use_bias=False, dtype=x.dtype, name=name)(
                x[..., : 4 * width if name == "down" else width]
            )
        return x


# The sizes are those of TransformerEngine's published GEMM times: 15872 tokens, width 4096.
LAYERS = {"layer": TransformerLayer, "mlp": MLP, "dense": Dense}
LAYER_SIZES = {"batch": 31, "context": 512, "width": 4096, "heads": 32}
