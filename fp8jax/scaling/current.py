"""Current scaling: the scale is computed from the tensor to cast. There is no state.

An amax that is zero, infinite or NaN gives scale 1.

References:
    TransformerEngine `Float8CurrentScaling`.
"""

from typing import Any

import jax

from fp8jax.quantization import scale_of
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import Scaling, State


def build(recipe: Recipe) -> Scaling:
    """Current scaling with the recipe's margin."""

    def init(operands: int) -> State:
        del operands
        return {}

    def scale(state: State, operand: int, amax: jax.Array, limit: float) -> jax.Array:
        del state, operand
        return scale_of(amax, limit, margin=recipe.margin)

    def update(state: State, amaxes: jax.Array, limits: Any) -> State:
        del amaxes, limits
        return state

    return Scaling(init, scale, update)
