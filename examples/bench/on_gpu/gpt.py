"""A GPT's training under a level of the precision chart, for the sections about train steps and convergence.

    learner = Learner(SIZES["GPT-124M"], "O2", "cudnn")
    state = compiled(learner, "init")(key)
    state, loss = compiled(learner, "step")(state, batch, total)    # `total` is the steps of the schedule

The model is that of train_gpt.py with activations in bfloat16, and a head in bfloat16.
"""

import functools
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8jax
from fp8jax.train.step.optimizers import decays
from on_gpu.notes import Given

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from gpt_model import GPT, GPTConfig

WARMUP, RATE, LAST_RATE = 100, 6e-4, 6e-5  # nanoGPT's for GPT-124M, with a shorter warm-up


class Size(NamedTuple):
    """Sizes of a model and its batch."""

    layers: int
    heads: int
    width: int
    batch: int  # sequences a step
    context: int = 1024
    vocabulary: int = 50304


SIZES = {"GPT-350M": Size(24, 16, 1024, 8), "GPT-124M": Size(12, 12, 768, 16)}
TINY = {name: Size(1, 2, 32, 2, 16, 256) for name in SIZES}


def size_of(name: str, given: Given) -> Size:
    """The size of that name, as it was asked for."""
    size = (TINY if given.tiny else SIZES)[name]
    return size._replace(batch=given.batch or size.batch)


State = tuple[Any, Any]  # variables, and the optimizer's


class Learner(NamedTuple):
    """A level's training: functions to be compiled."""

    size: Size
    level: str
    attention: str

    @property
    def model(self) -> Any:
        """The GPT in the level's formats."""
        sizes = {**self.size._asdict(), "dtype": "bfloat16", "attention": self.attention}
        config = GPTConfig(**{name: value for name, value in sizes.items() if name != "batch"})
        return fp8jax.transform(GPT(config), self.level)

    def optimizer(self, total: Any) -> optax.GradientTransformation:
        """Clipped AdamW; the last rate is reached after `total` steps, which may be traced."""

        def rate(step: Any) -> jax.Array:
            part = jnp.clip((step - WARMUP) / jnp.maximum(total - WARMUP, 1), 0, 1)
            falling = LAST_RATE + 0.5 * (1 + jnp.cos(jnp.pi * part)) * (RATE - LAST_RATE)
            return jnp.where(step < WARMUP, RATE * (step + 1) / (WARMUP + 1), falling)

        return optax.chain(
            fp8jax.optim.clip_by_global_norm(1.0),
            fp8jax.optim.adamw(rate, self.level, 0.9, 0.95, weight_decay=0.1, mask=decays),
        )

    def first_state(self, key: jax.Array) -> State:
        """Before the first step."""
        tokens = jnp.zeros((1, self.size.context), jnp.int32)
        variables = self.model.init(key, tokens)
        return variables, self.optimizer(1.0).init(variables)

    def loss(self, variables: Any, batch: jax.Array) -> jax.Array:
        """Mean of the tokens' cross entropy."""
        logits = self.model.apply(variables, batch[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def step(self, state: State, batch: jax.Array, total: Any) -> tuple[State, jax.Array]:
        """Gradient, clipping, AdamW; to be compiled with the state donated."""
        variables, opt_state = state
        loss, grads = fp8jax.value_and_grad(self.loss)(variables, batch)
        return self.update((variables, opt_state), grads, total), loss

    def update(self, state: State, grads: Any, total: Any) -> State:
        """The optimizer's part of a step."""
        variables, opt_state = state
        updates, opt_state = self.optimizer(total).update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state


@functools.cache
def shapes_of(learner: Learner) -> tuple[Any, Any, Any]:
    """Shapes of the state, a batch, and the gradients."""
    state = jax.eval_shape(learner.first_state, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((learner.size.batch, learner.size.context + 1), jnp.int32)
    _, grads = jax.eval_shape(fp8jax.value_and_grad(learner.loss), state[0], batch)
    return state, batch, grads


@functools.cache
def compiled(learner: Learner, what: str) -> Any:
    """The learner's program: "init", "step", "update" or "loss"."""
    state, batch, grads = shapes_of(learner)
    total = jax.ShapeDtypeStruct((), jnp.float32)
    functions = {
        "init": (learner.first_state, (jax.random.key(0),)),
        "step": (learner.step, (state, batch, total)),
        "update": (learner.update, (state, grads, total)),
        "loss": (learner.loss, (state[0], batch)),
    }
    function, args = functions[what]
    donated = 0 if what in ("step", "update") else None
    return jax.jit(function, donate_argnums=donated).lower(*args).compile()


def batch_of(tokens: np.ndarray, seed: tuple[int, int], size: Size) -> np.ndarray:
    """Windows at random places, with the last target: a pure function of its arguments."""
    starts = np.random.default_rng(seed).integers(len(tokens) - size.context, size=size.batch)
    return tokens[starts[:, None] + np.arange(size.context + 1)].astype(np.int32)
