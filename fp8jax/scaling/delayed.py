"""Delayed scaling: the scale is computed from the amaxes of previous steps.

A step casts with the scale of the previous step. The scale for the next step comes from the newest
`amax_history_len` amaxes, including this step's:

    scale = amax / format.max * 2**margin,   amax = max(history) or history[newest]

State of a dot's n operands:

    scale         # shape=(n,), float32: scale of the next cast
    amax_history  # shape=(n, amax_history_len), float32: newest first, 0 for steps without an amax
    one           # shape=(n,), float32: 1; states of 0.1.0 lack it
    step          # shape=(), float32: number of steps modulo interval; only if interval > 1

The next state is a gradient in JAX's own `value_and_grad`, and loops add gradients, divide them, or step
along them. A factor on scale and history leaves a state that looks like another one, but changes `one`; then
the scale is NaN, and so is the loss.

Differences from TransformerEngine: an infinite or NaN amax enters the history as 0, so that a bad step does
not freeze the scale until it leaves the history. A subnormal amax counts as none. Before the first amax the
scale is a typical scale with headroom (`quantization.TYPICAL`).

A cast does not wait for the tensor's amax, so XLA fuses the cast and the amax with the tensor's computation.
`first_scale="tensor"` uses the amax of the first tensor: the first step is scaled exactly, but every step
reads every tensor once more.

References:
    TransformerEngine `DelayedScaling`; FP8 Formats for Deep Learning, arXiv 2209.05433, section 3.2.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fp8jax.quantization import FIRST_SCALES, UNSET, factor_of, scale_of, select, usable
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import ScaleMethod, State

# The name of the entry that a factor on a state changes.
ONE = "one"

# Weights of a mean sum to 1 but for rounding.
_ROUNDING = 1e-3


def build(recipe: Recipe) -> ScaleMethod:
    """Delayed scaling with the recipe's margin, interval, history length and algorithm."""

    def init(operands: int) -> State:
        state = {
            "scale": jnp.array(FIRST_SCALES[recipe.first_scale][:operands], jnp.float32),
            "amax_history": jnp.zeros((operands, recipe.amax_history_len), jnp.float32),
            ONE: jnp.ones((operands,), jnp.float32),
        }
        if recipe.interval > 1:
            state["step"] = jnp.zeros((), jnp.float32)
        return state

    def scale(state: State, operand: int, amax: Float[Array, ""], limit: float) -> Float[Array, ""]:
        stored = lax.index_in_dim(state["scale"], operand, keepdims=False)
        # No amax is negative, but an optimizer that takes the state for a parameter makes it so at once.
        is_spoilt = state["amax_history"][operand, 0] < 0
        if ONE in state:
            is_spoilt |= ~(lax.abs(state[ONE][operand] - 1) <= _ROUNDING)
        stored = select(is_spoilt, float("nan"), stored)
        if recipe.first_scale != "tensor":
            return stored
        first = stored == UNSET
        # The same as `where(first, scale_of(...), stored)`, bit for bit.
        factor = factor_of(amax, limit, margin=recipe.margin)
        return select(first, 1.0, stored) / select(first & usable(amax), factor, 1.0)

    def update(state: State, amaxes: Float[Array, " n"], limits: Float[Array, " n"]) -> State:
        newest = select(usable(amaxes), amaxes, 0.0)
        # Shift the history by pad and select, which XLA fuses with the following operations.
        moved = lax.pad(state["amax_history"], np.float32(0), [(0, 0, 0), (1, -1, 0)])
        is_new = lax.broadcasted_iota(jnp.int32, moved.shape, 1) == 0
        history = lax.select(is_new, lax.broadcast_in_dim(newest, moved.shape, (0,)), moved)
        window = newest if recipe.amax_compute_algo == "most_recent" else jnp.max(history, axis=1)
        scale = scale_of(window, limits, margin=recipe.margin, otherwise=state["scale"])
        new = {"scale": scale, "amax_history": history}
        if recipe.interval > 1:
            is_due = state["step"] == 0
            if recipe.first_scale != "one":  # update at once after a first amax
                is_due |= jnp.max(state["amax_history"], axis=1) == 0
            new["scale"] = jnp.where(is_due, scale, state["scale"])
            new["step"] = jnp.mod(state["step"] + 1, recipe.interval)
        if ONE in state:
            # The same entry. As a function of the scale, XLA on GPU writes both in one kernel.
            new[ONE] = state[ONE] + 0 * new["scale"]
        return new

    return ScaleMethod(init, scale, update)
