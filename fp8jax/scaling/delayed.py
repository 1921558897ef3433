"""Delayed scaling: the scale comes from the amaxes of the steps before.

The step that sees an amax still casts with the old scale; the window that gives the next
scale is the newest `amax_history_len` amaxes, this step's included:

    scale = amax / format.max * 2**margin,   amax = max(window) or window[newest]

State of a dot's n operands:

    scale         # shape=(n,), float32: what the next step casts with
    amax_history  # shape=(n, amax_history_len), float32: newest first, 0 where nothing was seen
    step          # shape=(), float32: steps seen modulo interval; only where interval > 1

What differs from TransformerEngine, on purpose: an infinite or NaN amax enters the window as
0, so that one bad step is forgotten at once instead of freezing the scale until it leaves
the window; subnormal amaxes cannot make an infinite factor; and until a tensor with an amax
was seen, the scale is that of a typical one, with room for others (`scaled.TYPICAL`).

No cast waits for an amax, so that a compiler casts a tensor where it is computed and takes
its amax in passing. `first_scale="tensor"` starts from the first tensor itself: exactly
scaled from the first step on, for one more reading of every tensor at all steps.

References:
    TransformerEngine `DelayedScaling`; FP8 Formats for Deep Learning, arXiv 2209.05433,
    section 3.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.recipe import Recipe
from fp8jax.scaled import FIRST_SCALES, UNSET, factor_of, scale_of, select, usable
from fp8jax.scaling.base import Scaling, State


def build(recipe: Recipe) -> Scaling:
    """Delayed scaling with the recipe's margin, interval, window and algorithm."""

    def init(operands: int) -> State:
        state = {
            "scale": jnp.array(FIRST_SCALES[recipe.first_scale][:operands], jnp.float32),
            "amax_history": jnp.zeros((operands, recipe.amax_history_len), jnp.float32),
        }
        if recipe.interval > 1:
            state["step"] = jnp.zeros((), jnp.float32)
        return state

    def scale(state: State, operand: int, amax: jax.Array, limit: float) -> jax.Array:
        kept = lax.index_in_dim(state["scale"], operand, keepdims=False)
        if recipe.first_scale != "tensor":
            return kept
        first = kept == UNSET
        # Exactly `where(first, scale_of(...), kept)`, see there.
        factor = factor_of(amax, limit, margin=recipe.margin)
        return select(first, 1.0, kept) / select(first & usable(amax), factor, 1.0)

    def update(state: State, amaxes: jax.Array, limits: Any) -> State:
        newest = select(usable(amaxes), amaxes, 0.0)
        # The oldest leaves and the newest enters; as a choice, which XLA fuses with what follows.
        moved = lax.pad(state["amax_history"], np.float32(0), [(0, 0, 0), (1, -1, 0)])
        is_new = lax.broadcasted_iota(jnp.int32, moved.shape, 1) == 0
        history = lax.select(is_new, lax.broadcast_in_dim(newest, moved.shape, (0,)), moved)
        window = newest if recipe.amax_compute_algo == "most_recent" else jnp.max(history, axis=1)
        scale = scale_of(window, limits, margin=recipe.margin, otherwise=state["scale"])
        if recipe.interval == 1:
            return {"scale": scale, "amax_history": history}
        is_due = state["step"] == 0
        if recipe.first_scale != "one":  # nobody waits for a scale of his own
            is_due |= jnp.max(state["amax_history"], axis=1) == 0
        return {
            "scale": jnp.where(is_due, scale, state["scale"]),
            "amax_history": history,
            "step": jnp.mod(state["step"] + 1, recipe.interval),
        }

    return Scaling(init, scale, update)
