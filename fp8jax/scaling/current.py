"""Current scaling: the scale is computed from the tensor to cast. There is no state.

An amax that is zero, infinite or NaN gives scale 1.

References:
    TransformerEngine `Float8CurrentScaling`.
"""

from jaxtyping import Array, Float

from fp8jax.quantization import scale_of
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import ScaleMethod, State


def build(recipe: Recipe) -> ScaleMethod:
    """Current scaling with the recipe's margin."""

    def scale(state: State, operand: int, amax: Float[Array, ""], limit: float) -> Float[Array, ""]:
        return scale_of(amax, limit, margin=recipe.margin)

    return ScaleMethod(init=lambda operands: {}, scale=scale, update=lambda state, amaxes, limits: state)
