# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The same model in NNX and PyTorch
#
# A recipe means the same in Flax NNX and in PyTorch: the same layers, scales, casts and moments. This
# notebook trains the same model in both, with the same recipe and initial weights, and compares the losses.
# Then it converts the trained PyTorch model to NNX.
#
# It needs `pip install ".[train,torch]"` in a copy of the repository and no GPU.

# %%
import argparse
import inspect as source

import fp8jax_torch
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import torch
from flax import nnx
from fp8jax_torch.bridge import from_flax, mapping_of, to_flax

import fp8jax

RECIPE, WIDTH, STEPS, BATCH, CONTEXT = "fp8", 64, 60, 16, 64

text = np.frombuffer(source.getsource(argparse).encode("ascii", "replace"), np.uint8).astype(np.int32)


def batch_of(step):
    starts = np.random.default_rng(step).integers(len(text) - CONTEXT - 1, size=BATCH)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


# %% [markdown]
# ## The model in NNX
#
# Each block has an MLP. A causal mean over the earlier positions takes the place of attention.


# %%
def past(x):
    """The mean over the positions so far, shape=(batch, time, width)."""
    return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(2 * width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        y = self.up(jnp.concatenate([y, past(y)], axis=-1))
        return x + self.down(nnx.gelu(y))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        self.first = Block(WIDTH, rngs)
        self.second = Block(WIDTH, rngs)
        self.lm_head = nnx.Linear(WIDTH, 128, rngs=rngs)

    def __call__(self, tokens):
        return self.lm_head(self.second(self.first(self.embed(tokens))))


# %% [markdown]
# `fp8jax.transform` returns a new module and does not change yours. The loop is the usual one of NNX, except
# for `fp8jax.value_and_grad` and the optimizer.

# %%
model = fp8jax.transform(Net(nnx.Rngs(0)), RECIPE)
optimizer = nnx.Optimizer(model, fp8jax.optim.adamw(1e-3, RECIPE), wrt=nnx.Param)


@nnx.jit
def nnx_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, grads = fp8jax.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


print(fp8jax.report(model, batch_of(0)[:, :-1]))

# %% [markdown]
# ## The model in PyTorch
#
# The modules have the same names, so `mapping_of` can match their tensors.


# %%
class TorchBlock(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(2 * width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(x)
        past = y.cumsum(1) / torch.arange(1, y.shape[1] + 1)[None, :, None]
        y = self.up(torch.cat([y, past], dim=-1))
        return x + self.down(torch.nn.functional.gelu(y, approximate="tanh"))


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(128, WIDTH)
        self.first = TorchBlock(WIDTH)
        self.second = TorchBlock(WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, 128)

    def forward(self, tokens):
        return self.lm_head(self.second(self.first(self.embed(tokens))))


# %% [markdown]
# `fp8jax_torch.prepare` takes the model and the optimizer. The training loop does not change.

# %%
net = TorchNet()
adamw = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-4)  # optax's default
net, adamw = fp8jax_torch.prepare(net, adamw, RECIPE, backend="native")


def torch_step(batch):
    tokens = torch.from_numpy(batch).long()
    logits = net(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    adamw.zero_grad()
    loss.backward()
    adamw.step()
    return loss.item()


print(fp8jax_torch.report(net))

# %% [markdown]
# ## One run on each side
#
# The bridge copies the codes and scales of the NNX model's weights to PyTorch, bit for bit. From here on both
# models see the same batches.

# %%
mapping = mapping_of(net)
net.load_state_dict(from_flax(nnx.state(model), mapping, like=net.state_dict()))

losses = {"NNX": [], "PyTorch": []}
for step in range(STEPS):
    losses["NNX"].append(float(nnx_step(model, optimizer, batch_of(step))))
    losses["PyTorch"].append(torch_step(batch_of(step)))

for step in (0, 1, STEPS // 2, STEPS - 1):
    print(f"step {step + 1:3}  NNX {losses['NNX'][step]:.5f}  PyTorch {losses['PyTorch'][step]:.5f}")

# %% [markdown]
# The losses agree until rounding separates the runs: the two libraries add in different orders, and a sum
# that differs in its last bit may be rounded to a different FP8 number.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
for (name, curve), style in zip(losses.items(), ("-", "--"), strict=True):
    left.plot(curve, style, label=name)
left.set(xlabel="step", ylabel="loss", title=f"One model under {RECIPE}")
left.legend()
right.semilogy(np.abs(np.subtract(*losses.values())) + 1e-8)
right.set(xlabel="step", title="distance of the two losses")
plt.show()

# %% [markdown]
# ## From PyTorch to NNX
#
# The bridge also converts a trained model back to NNX. `optimizer_to_flax` does the same for the moments, so
# a run can continue where it stopped.

# %%
nnx.update(model, to_flax(net.state_dict(), mapping, like=nnx.state(model)))
kernel = model.first.up.kernel[...]
weight = net.first.up.weight
print("codes in NNX:    ", kernel.data.dtype, kernel.shape, "scale", np.asarray(kernel.scale).item())
print("codes in PyTorch:", weight.codes.dtype, tuple(weight.shape), "scale", weight.scale.item())
print("the same codes:  ", np.array_equal(np.asarray(kernel.data), weight.codes.numpy().T))

# %% [markdown]
# ## The plain models
#
# Both libraries can return the parameters in high precision, for export or evaluation.

# %%
plain = fp8jax.adapters.nnx.dequantize(model)
print("NNX:    ", type(plain).__name__, plain.first.up.kernel[...].dtype)
plain_net = fp8jax_torch.dequantize(net)
print("PyTorch:", type(plain_net).__name__, plain_net.first.up.weight.dtype)

# %% [markdown]
# ## Next
#
# [NNX](../getting-started/nnx.md) and [PyTorch](../getting-started/pytorch.md), [short answers](../how-to.md)
