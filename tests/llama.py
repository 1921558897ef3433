"""A tiny Llama in Linen, with the names of Hugging Face's, and its `config.json`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fp8jax

WIDTH, HIDDEN, HEADS, GROUPS, LAYERS, WORDS = 256, 384, 4, 2, 2, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

TOKENS = np.random.default_rng(0).integers(0, WORDS, (2, 16))


def dense(features, name):
    return nn.Dense(features, use_bias=False, name=name)


def rotated(x):
    """Rotary positions, (batch, time, heads, dim)."""
    half = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(half) / half))[None, :, None]
    cos, sin, (a, b) = jnp.cos(angle), jnp.sin(angle), jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        def heads(number, name):
            return dense(number * WIDTH // HEADS, name)(x).reshape(*x.shape[:2], number, -1)

        query, key = rotated(heads(HEADS, "q_proj")), rotated(heads(GROUPS, "k_proj"))
        y = jax.nn.dot_product_attention(query, key, heads(GROUPS, "v_proj"), is_causal=True)
        return dense(WIDTH, "o_proj")(y.reshape(x.shape))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return dense(WIDTH, "down_proj")(nn.silu(dense(HIDDEN, "gate_proj")(x)) * dense(HIDDEN, "up_proj")(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + Attention(name="self_attn")(nn.RMSNorm(name="input_layernorm")(x))
        return x + MLP(name="mlp")(nn.RMSNorm(name="post_attention_layernorm")(x)), None


class Layers(nn.Module):
    """A container, as torch's ModuleList."""

    @nn.compact
    def __call__(self, x):
        for number in range(LAYERS):
            x, _ = Layer(name=str(number))(x)
        return x


class Model(nn.Module):
    is_scanned: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH, name="embed_tokens")(tokens)
        if self.is_scanned:
            scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = scan(name="layers")(x, None)
        else:
            x = Layers(name="layers")(x)
        return nn.RMSNorm(name="norm")(x)


class Llama(nn.Module):
    is_scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        return dense(WORDS, "lm_head")(Model(self.is_scanned, name="model")(tokens))


@functools.cache
def trained(recipe, is_scanned=False):
    """A model, and its variables after steps that move the scales."""
    model = fp8jax.transform(Llama(is_scanned), recipe)
    variables = model.init(jax.random.key(1), TOKENS)
    step = jax.jit(fp8jax.value_and_grad(lambda v: (model.apply(v, TOKENS) ** 2).mean()))
    for _ in range(2):
        variables = step(variables)[2]
    return model, variables
