"""The models and the data of hard_cases.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import fp8jax
from fp8jax.adapters import moe

INPUTS, WIDTH, ROWS, WORDS = 128, 128, 128, 2048
Batch = dict[str, jax.Array]


class MLP(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (rows, features) to (rows, 32)."""
        x = nn.gelu(nn.Dense(WIDTH, name="first")(x))
        x = nn.gelu(nn.Dense(WIDTH, name="second")(x))
        return nn.Dense(32, name="third")(x)


class Embedded(nn.Module):
    """An embedding before the same layers."""

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Maps words, shape=(rows,), to (rows, 32)."""
        return MLP(name="layers")(nn.Embed(WORDS, INPUTS, name="embedding")(words))


class Experts(nn.Module):
    """A mixture of experts between two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (rows, features) to (rows, 32)."""
        x = x + moe.linen.MoE(2 * WIDTH, num_experts=8, name="experts")(nn.Dense(WIDTH, name="first")(x))
        return nn.Dense(32, name="third")(x)


def mean_square(out: jax.Array, batch: Batch) -> jax.Array:
    """The loss of a batch."""
    return jnp.mean(jnp.square(out - batch["y"]))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data, and its training.

    Attributes:
        model: maps `batch["x"]` to what the loss gets.
        batch: (key, step) -> a batch; a held-out one has step -1.
        steps: optimizer steps.
        rate: the learning rate, or a schedule.
        betas: of Adam.
        warm: steps at a rate of 1e-3, in float32, from which the weights start; the targets then are others.
        lora: adapters.
    """

    model: nn.Module
    batch: Callable[[jax.Array, Any], Batch]
    steps: int = 2000
    rate: Any = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    warm: int = 0
    lora: fp8jax.LoRA | None = None


def teacher(x: jax.Array, shift: float) -> jax.Array:
    """Targets of inputs with a variance of 1: two layers that are not trained, or ones near them."""
    first, second, other = jax.random.split(jax.random.key(1000), 3)
    hidden = jnp.tanh(x @ (jax.random.normal(first, (INPUTS, 64)) / INPUTS**0.5))
    kernel = jax.random.normal(second, (64, 32)) + shift * jax.random.normal(other, (64, 32))
    return hidden @ kernel / 8


def plain(key: jax.Array, step: Any, shift: float = 0.0) -> Batch:
    """Normal inputs."""
    del step
    x = jax.random.normal(key, (ROWS, INPUTS))
    return {"x": x, "y": teacher(x, shift)}


def outliers(key: jax.Array, step: Any) -> Batch:
    """One channel is 100 times the others."""
    batch = plain(key, step)
    return {**batch, "x": batch["x"] * jnp.where(jnp.arange(INPUTS) % 100 == 50, 100.0, 1.0)[None]}


def words(key: jax.Array, step: Any) -> Batch:
    """Words by Zipf's law, each with a target of its own."""
    del step
    frequency = 1 / jnp.arange(1, WORDS + 1)
    x = jax.random.choice(key, WORDS, (ROWS,), p=frequency / frequency.sum())
    targets = jax.random.normal(jax.random.key(7), (WORDS, 32))
    return {"x": x, "y": targets[x]}


def spike(key: jax.Array, step: Any) -> Batch:
    """A batch of garbage at step 1000."""
    batch, is_bad = plain(key, step), step == 1000
    noise = jax.random.normal(jax.random.fold_in(key, 1), batch["y"].shape)
    return {
        "x": jnp.where(is_bad, 1000 * batch["x"], batch["x"]),
        "y": jnp.where(is_bad, 1000 * noise, batch["y"]),
    }


def unbalanced(key: jax.Array, step: Any) -> Batch:
    """Inputs of a common direction, so that the router prefers some experts."""
    batch = plain(key, step)
    return {**batch, "x": batch["x"] + 2.0}


near = functools.partial(plain, shift=0.05)
CASES = {
    "outliers": Case(MLP(), outliers),
    "cosine tail": Case(MLP(), plain, 5000, optax.cosine_decay_schedule(1e-3, 5000, 0.01), betas=(0.9, 0.95)),
    "Zipf": Case(Embedded(), words, 3000),
    "experts": Case(Experts(), unbalanced, 1000),
    "fine-tuning": Case(MLP(), near, 1000, 1e-6, warm=3000),
    "LoRA": Case(MLP(), near, 1000, 1e-3, warm=3000, lora=fp8jax.LoRA(rank=8, alpha=16.0)),
    "spike": Case(MLP(), spike),
    "long": Case(MLP(), plain, 20_000, optax.cosine_decay_schedule(1e-3, 20_000, 0.01)),
}
