"""A product in FP8 for Linen modules that take a `dot_general_cls`, with a scaling state of its own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8jax.dot import dot_general, init_state
from fp8jax.recipe import Recipe
from fp8jax.variables import SCALING


class DotGeneral(nn.Module):
    """What `fp8jax.dot_general_cls` makes: a product with a scaling state of its own."""

    recipe: Recipe
    backend: str = "auto"

    @nn.compact
    def __call__(self, lhs: Any, rhs: Any, dimension_numbers: Any, *ignored: Any, **kwargs: Any) -> jax.Array:
        """`lax.dot_general`; precision and the like are those of a wider GEMM."""
        fresh = init_state(self.recipe)
        state = {name: self.variable(SCALING, name, lambda x=x: x).value for name, x in fresh.items()}
        out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            recipe=self.recipe,
            state=state,
            out_dtype=out_dtype,
            backend=self.backend,
        )


def dot_general_cls(recipe: Recipe | str, *, backend: str = "auto") -> Callable[[], DotGeneral]:
    """For Linen modules that take a `dot_general_cls`: their products in FP8, without `transform`.

        nn.Dense(16, dot_general_cls=fp8jax.dot_general_cls("te"))

    The state is in "_overwrite_with_gradient"; `fp8jax.value_and_grad` and `fp8jax.apply_updates` take
    such variables. Under `nn.scan` and `nn.vmap` that collection needs an axis, as any other.

    Args:
        recipe: its GEMM column is used; kernels come as the layer gives them.
        backend: see `fp8jax.transform`.

    Raises:
        ValueError: the recipe's GEMMs are not FP8.
    """
    recipe = Recipe.parse(recipe)
    if recipe.gemm != "FP8":
        raise ValueError(f"`recipe`: expected gemm=FP8; got gemm={recipe.gemm}.")
    recipe = dataclasses.replace(recipe, weight="FP32", weight_grad="FP32", master_weight="-")
    return functools.partial(DotGeneral, recipe, backend)
