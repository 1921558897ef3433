"""Dynamic loss scaling: float16 gradients are kept in range by a factor on the loss.

    variables["loss_scale"]      # {"scale": ..., "good_steps": ...}, where a recipe's gemm is FP16

The loss is multiplied by the scale before the backward, and the gradients are divided by it
after. A step with an infinite or NaN gradient halves the scale, and the optimizer skips it;
2000 steps without one double it.

References:
    Mixed Precision Training, arXiv 1710.03740, section 3.2; the constants are those of
    `torch.amp.GradScaler`.
"""

from typing import Any

import jax
import jax.numpy as jnp

State = dict[str, jax.Array]

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


def init() -> State:
    """The state before the first step.

    Returns:
        scale: shape=(), float32, a power of two.
        good_steps: shape=(), int32: steps since it changed.
    """
    return {"scale": jnp.float32(FIRST), "good_steps": jnp.zeros((), jnp.int32)}


def update(state: State, is_finite: jax.Array) -> State:
    """The state after a step whose gradients were all finite, or not."""
    scale, good = state["scale"], state["good_steps"] + 1
    grown = jnp.where(good >= INTERVAL, scale * GROWTH, scale)
    return {
        "scale": jnp.clip(jnp.where(is_finite, grown, scale * BACKOFF), LEAST, MOST),
        "good_steps": jnp.where(is_finite & (good < INTERVAL), good, 0),
    }


def unscale(grads: Any, state: State) -> tuple[Any, State]:
    """Gradients of the loss from those of the scaled loss, and the state for the next step."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads)]
    grads = jax.tree.map(lambda g: (g * (1 / state["scale"])).astype(g.dtype), grads)
    return grads, update(state, jnp.all(jnp.stack([jnp.array(True), *finite])))
