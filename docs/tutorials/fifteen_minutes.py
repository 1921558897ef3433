# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # FP8 in fifteen minutes
#
# This notebook converts a Linen model and its bf16 training loop to FP8, with 7 bytes per parameter. It
# changes five lines of the loop, none of the model (FP8 GEMMs alone [need one](../getting-started/linen.md)).
# It shows which layers run in FP8, how the loss compares, and how many bytes are stored.
#
# It needs `pip install ".[train]"` in a copy of the repository. A CPU emulates the rounding of a GPU, slowly.

# %%
import argparse
import inspect as source

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fp8jax
from fp8jax.inspect import chart

jax.config.update("jax_num_cpu_devices", 2)  # for the chart below

# %% [markdown]
# ## A model and a loop in bf16
#
# The model is a small GPT that predicts the next character. Weights are float32; layers compute in bf16.


# %%
class Block(nn.Module):
    """Attention, then an MLP."""

    heads: int = 4

    @nn.compact
    def __call__(self, x):
        batch, time, width = x.shape
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.Dense(3 * width, dtype=jnp.bfloat16, name="qkv")(y)
        query, key, value = jnp.split(y.reshape(batch, time, self.heads, -1), 3, axis=-1)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(width, dtype=jnp.bfloat16, name="out")(y)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16, name="up")(y))
        return x + nn.Dense(width, dtype=jnp.bfloat16, name="down")(y)


class GPT(nn.Module):
    """Two blocks between an embedding and a head."""

    width: int = 128

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, self.width, dtype=jnp.bfloat16, name="embed")(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = x + positions.astype(x.dtype)
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(128, dtype=jnp.bfloat16, name="lm_head")(nn.LayerNorm(dtype=jnp.bfloat16)(x))


# %% [markdown]
# The text is the source code of one of Python's modules. A batch has 16 windows of 64 characters.
# The loop is the usual one for optax.

# %%
text = np.frombuffer(source.getsource(argparse).encode("ascii", "replace"), np.uint8).astype(np.int32)
STEPS, BATCH, CONTEXT = 100, 16, 64


def batch_of(step):
    starts = np.random.default_rng(step).integers(len(text) - CONTEXT - 1, size=BATCH)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def loss_of(model, variables, batch):
    logits = model.apply(variables, batch[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


module = GPT()
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
params = module.init(jax.random.key(0), batch_of(0)[:, :-1])
opt_state = tx.init(params)


@jax.jit
def bf16_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: loss_of(module, params, batch))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


losses = {"bf16": []}
for step in range(STEPS):
    params, opt_state, loss = bf16_step(params, opt_state, batch_of(step))
    losses["bf16"].append(float(loss))
print(f"bf16: loss {losses['bf16'][0]:.2f} at the first step, {np.mean(losses['bf16'][-20:]):.2f} at the end")

# %% [markdown]
# ## The same loop in FP8
#
# A *recipe* names a format for each kind of tensor. `fp8` also saves memory; `current` needs one line only.
# Five lines change:
#
# 1. `fp8jax.transform(module, recipe)` gives a model that computes its linear layers in FP8;
# 2. `fp8jax.optim.clip_by_global_norm` replaces optax's, because FP8 gradients have scales;
# 3. `fp8jax.optim.adamw` stores the moments in the recipe's formats;
# 4. `fp8jax.value_and_grad` replaces JAX's: it returns FP8 gradients, and variables with the new scales;
# 5. `fp8jax.apply_updates` replaces optax's, and updates these variables.


# %%
def train(recipe):
    model = fp8jax.transform(GPT(), recipe)
    tx = optax.chain(fp8jax.optim.clip_by_global_norm(1.0), fp8jax.optim.adamw(1e-3, recipe))
    variables = model.init(jax.random.key(0), batch_of(0)[:, :-1])
    opt_state = tx.init(variables["params"])

    @jax.jit
    def step(variables, opt_state, batch):
        loss, grads, variables = fp8jax.value_and_grad(lambda v: loss_of(model, v, batch))(variables)
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    losses = []
    for i in range(STEPS):
        variables, opt_state, loss = step(variables, opt_state, batch_of(i))
        losses.append(float(loss))
    return model, variables, opt_state, losses


model, variables, fp8_state, losses["fp8"] = train("fp8")

# %% [markdown]
# ## The report: which layers run in FP8?
#
# The report has a line for each layer, with a reason if it is not in FP8. By default the head stays in bf16.

# %%
print(model.report(batch_of(0)[:, :-1]))

# %% [markdown]
# ## The chart: is each tensor stored as the recipe says?
#
# The chart is read back from compiled training steps, not from the recipe. `fp8jax chart` prints it for all
# recipes, and `fp8jax chart --target h200` reads programs compiled for an H200, without having one.

# %%
print(chart.table([chart.measure(recipe, devices=2) for recipe in ("bf16", "fp8")]))

# %% [markdown]
# ## The loss: what does FP8 cost?

# %%
figure, axes = plt.subplots(figsize=(7, 3))
for (name, curve), width in zip(losses.items(), (4, 1.5), strict=True):
    axes.plot(np.convolve(curve, np.ones(10) / 10, "valid"), label=name, linewidth=width)
axes.set(xlabel="step", ylabel="loss, mean of 10 steps", title="A small GPT under two recipes")
axes.legend()
plt.show()
for name, curve in losses.items():
    print(f"{name:5} {np.mean(curve[-20:]):.3f}")

# %% [markdown]
# ## What it saves
#
# The bytes per parameter count all arrays that are stored between two steps. The embedding, norms and head
# stay in float32, so a small model saves less than a large one.


# %%
def bytes_of(tree, count):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / count


count = sum(leaf.size for leaf in jax.tree.leaves(params))
kernel = variables["params"]["block_0"]["up"]["kernel"]
moments = fp8jax.optim.moments(fp8_state)
print("a kernel:        ", kernel.data.dtype, kernel.shape, "with the scale", kernel.scale.item())
print("its first moment:", moments[0]["block_0"]["up"]["kernel"].data.dtype)

for name, trees in {"bf16": (params["params"], opt_state), "fp8": (variables["params"], fp8_state)}.items():
    weights, state = (bytes_of(tree, count) for tree in trees)
    print(f"{name:5} weights {weights:.2f}  optimizer {state:.2f}  together {weights + state:.2f}")

# %% [markdown]
# ## The way back
#
# `model.dequantize` returns the parameters of the plain model, under their original names. Save them, or
# continue to train them.

# %%
plain = model.dequantize(variables)
print("loss in FP8: ", loss_of(model, variables, batch_of(STEPS)))
print("loss in bf16:", loss_of(module, {"params": plain["params"]}, batch_of(STEPS)))

# %% [markdown]
# ## Next
#
# - [The same model in NNX and PyTorch](nnx_and_torch.md), and [choosing a recipe](../recipes.md)
# - `./dev train` trains a larger GPT next to its bf16 twin and writes a report page.
