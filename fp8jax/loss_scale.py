"""Dynamic loss scaling, which keeps float16 gradients in range.

    variables["loss_scale"]      # {"scale": ..., "good_steps": ...}, if the recipe's gemm is FP16

The loss is multiplied by the scale before the backward, and the gradients are divided by it afterwards. A
step with an infinite or NaN gradient halves the scale, and the optimizer skips the step; `INTERVAL` steps
without one double it.

References:
    Mixed Precision Training, arXiv 1710.03740, section 3.2; the constants are those of
    `torch.amp.GradScaler`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from fp8jax.quantization import ScaledArray, is_scaled

State = dict[str, jax.Array]

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


def init() -> State:
    """The state before the first step.

    Returns:
        scale: shape=(), float32, a power of two.
        good_steps: shape=(), int32: number of steps since the scale changed.
    """
    return {"scale": jnp.float32(FIRST), "good_steps": jnp.zeros((), jnp.int32)}


def update(state: State, is_finite: Bool[Array, ""]) -> State:
    """The state after a step; `is_finite` says whether all of its gradients were finite."""
    scale, good = state["scale"], state["good_steps"] + 1
    grown = jnp.where(good >= INTERVAL, scale * GROWTH, scale)
    return {
        "scale": jnp.clip(jnp.where(is_finite, grown, scale * BACKOFF), LEAST, MOST),
        "good_steps": jnp.where(is_finite & (good < INTERVAL), good, 0),
    }


def unscale(grads: PyTree, state: State) -> tuple[PyTree, State]:
    """The gradients of the loss from those of the scaled loss, in the same formats; and the next state.

    Raises:
        ValueError: a gradient is float16, and so its parameter, where the divided gradient would be lost.
    """
    if any(not is_scaled(g) and g.dtype == jnp.float16 for g in jax.tree.leaves(grads, is_scaled)):
        raise ValueError(
            "`variables`: expected parameters in float32 or bfloat16 with a loss scale; got float16, in "
            "which gradients become 0 when they are divided by the scale. Cast the parameters to float32 "
            "before `init`: the recipe casts for its GEMMs."
        )
    finite = [jnp.all(jnp.isfinite(g.data if is_scaled(g) else g)) for g in jax.tree.leaves(grads, is_scaled)]

    def unscaled(g: Any) -> Any:
        factor = 1 / state["scale"]
        return ScaledArray(g.data, g.scale * factor) if is_scaled(g) else (g * factor).astype(g.dtype)

    grads = jax.tree.map(unscaled, grads, is_leaf=is_scaled)
    return grads, update(state, jnp.all(jnp.stack([jnp.array(True), *finite])))
