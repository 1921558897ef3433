"""Models as people write them, Linen and NNX: each trains at O2 as it does in bf16."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax.optim import adamw, clip_by_global_norm

pytestmark = pytest.mark.long

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 48, (4, 16))
IMAGES = RNG.normal(size=(8, 16, 16, 3)).astype(np.float32)
CLASSES = RNG.integers(0, 10, 8)
WIDTH, HEADS, HEAD = 64, 4, 16


def cross_entropy(logits, targets):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))


# Linen ###########################################################################################


class EncoderDecoder(nn.Module):
    """T5-style: encoder, decoder with cross attention, gated feed forward, head tied to the embedding."""

    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, source, target):
        def attend(name, x, memory, mask=None):
            h = nn.RMSNorm(dtype=self.dtype, name=f"{name}_norm")(x)
            memory = h if memory is None else memory
            attention = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, use_bias=False, name=name)
            return x + attention(h, memory, mask=mask)

        def feed_forward(name, x):
            h = nn.RMSNorm(dtype=self.dtype, name=f"{name}_norm")(x)
            wide = [nn.Dense(2 * WIDTH, False, self.dtype, name=f"{name}_wi_{i}")(h) for i in (0, 1)]
            return x + nn.Dense(WIDTH, False, self.dtype, name=f"{name}_wo")(nn.gelu(wide[0]) * wide[1])

        embed = nn.Embed(48, WIDTH, dtype=self.dtype)
        memory = embed(source)
        for i in range(1):
            memory = feed_forward(f"encoder_{i}", attend(f"encode_{i}", memory, None))
        x = embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
        for i in range(1):
            x = attend(f"decode_{i}", x, None, nn.make_causal_mask(target))
            x = feed_forward(f"decoder_{i}", attend(f"cross_{i}", x, memory))
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(x) * WIDTH**-0.5)


class ViT(nn.Module):
    """Patches by a convolution, a class token, blocks under scan and remat, a head."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (4, 4), (4, 4), name="patches")(images).reshape(len(images), -1, WIDTH)
        token = self.param("token", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, WIDTH)), x], 1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                h = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(HEADS)(h)
                return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))), None

        blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x[:, 0]))


class ResNet(nn.Module):
    """Convolutions and statistics; one dense layer before the head."""

    @nn.compact
    def __call__(self, images, train=True):
        x = nn.Conv(16, (3, 3))(images)
        for i in range(2):
            h = nn.relu(nn.BatchNorm(use_running_average=not train, name=f"norm_{i}")(x))
            x = x + nn.Conv(16, (3, 3), name=f"conv_{i}")(h)
        x = nn.relu(nn.Dense(WIDTH, name="neck")(x.mean((1, 2))))
        return nn.Dense(10, name="head")(x)


# Module, inputs, targets, the least share of FLOPs in FP8, and the layers that only a rule has in FP8.
LINEN = {
    "encoder-decoder": (EncoderDecoder(), (TOKENS, np.roll(TOKENS, 1, 1)), np.roll(TOKENS, 1, 1), 0.7, []),
    "ViT": (ViT(), (IMAGES,), CLASSES, 0.7, []),
    "ResNet": (ResNet(), (IMAGES,), CLASSES, 0.0, ["neck"]),
}


@pytest.mark.parametrize("module, inputs, targets, share, asked", LINEN.values(), ids=LINEN.keys())
def test_linen_models(module, inputs, targets, share, asked):
    losses = {}
    plain = module.init(jax.random.key(0), *inputs)
    for recipe in ("bf16", "O2"):
        rules = [fp8jax.Rule(layer, "O2") for layer in asked] if recipe == "O2" else []
        model = fp8jax.transform(module, recipe, rules=rules)
        variables = model.init(jax.random.key(0), *inputs)
        tx = optax.chain(clip_by_global_norm(1.0), adamw(2e-3, recipe))
        mutable = [name for name in plain if name != "params"]

        def loss_fn(variables, model=model, mutable=mutable):
            out, new = model.apply(variables, *inputs, mutable=mutable)
            return cross_entropy(out, targets), new

        @jax.jit
        def step(variables, state, loss_fn=loss_fn, tx=tx):
            (loss, new), grads, variables = fp8jax.value_and_grad(loss_fn, has_aux=True)(variables)
            updates, state = tx.update(grads, state, variables)
            return {**fp8jax.apply_updates(variables, updates), **new}, state, loss

        state, losses[recipe] = tx.init(variables), []
        for _ in range(20):
            variables, state, loss = step(variables, state)
            losses[recipe].append(float(loss))
    assert step._cache_size() == 1
    report = model.report(*inputs)
    assert report.fp8_share > share and any(row.fp8 for row in report.rows)
    assert losses["O2"][-1] < 0.8 * losses["O2"][0]
    np.testing.assert_allclose(losses["O2"], losses["bf16"], atol=0.05 * losses["bf16"][0])
    # A plain checkpoint loads, and one of it is plain.
    again = model.quantize(plain, like=variables)
    assert jax.tree.structure(again) == jax.tree.structure(variables)
    assert jax.tree.structure(model.dequantize(again)) == jax.tree.structure(plain)


# NNX #############################################################################################


def rotated(x):
    """Rotary positions, (batch, time, heads, dim)."""
    half = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(half) / half))[None, :, None]
    cos, sin, (a, b) = jnp.cos(angle), jnp.sin(angle), jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class DecoderLayer(nnx.Module):
    """RMSNorm, grouped queries, rotary positions, SwiGLU."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.q = nnx.LinearGeneral(WIDTH, (HEADS, HEAD), use_bias=False, rngs=rngs)
        self.kv = nnx.Einsum("btd,dnkh->nbtkh", (WIDTH, 2, HEADS // 2, HEAD), rngs=rngs)
        self.o = nnx.LinearGeneral((HEADS, HEAD), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.gate, self.up = (nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.norms[0](x)
        key, value = self.kv(h)
        x = x + self.o(jax.nn.dot_product_attention(rotated(self.q(h)), rotated(key), value, is_causal=True))
        h = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class Decoder(nnx.Module):
    """Layers made under vmap and run under scan and remat; the head is the embedding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(48, WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=2)(nnx.vmap(DecoderLayer, in_axes=0, out_axes=0))
        self.layers = make(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return self.embed.attend(self.norm(run(self.embed(tokens), self.layers)))


def test_an_nnx_decoder():
    losses, targets = {}, np.roll(TOKENS, -1, 1)
    rules = [fp8jax.Rule("embed", "O2")]
    for recipe in ("bf16", "O2"):
        given = rules if recipe == "O2" else []
        model = fp8jax.transform(Decoder(nnx.Rngs(0)), recipe, rules=given)
        tx = optax.chain(clip_by_global_norm(1.0), adamw(2e-3, recipe))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            loss_fn = lambda model: cross_entropy(model(TOKENS), targets)  # noqa: E731
            loss, grads = fp8jax.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return loss

        losses[recipe] = [float(step(model, optimizer)) for _ in range(20)]
    report = fp8jax.report(model, TOKENS)
    rows = {row.path: row for row in report.rows}
    assert report.fp8_share > 0.9 and rows["embed"].fp8
    assert rows["layers/kv"].kernel_shape == (WIDTH, 2, HEADS // 2, HEAD)
    assert losses["O2"][-1] < 0.8 * losses["O2"][0]
    np.testing.assert_allclose(losses["O2"], losses["bf16"], atol=0.05 * losses["bf16"][0])
