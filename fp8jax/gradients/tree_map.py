"""Arithmetic on gradients that may be FP8: sums, factors, averages, noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.optim.guard.lost_tags import check_tags
from fp8jax.quantization import ScaledGradient, is_scaled, quantize_gradient, value


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` over the values of gradients: `tree_map(jnp.add, a, b)` is the sum of two gradients.

    `jax.tree.map` itself would act on the codes and on the scales of an FP8 gradient apart. With float
    gradients, as the recipe "te" has, both are the same.

    Args:
        f: a function of arrays of one parameter's gradients that returns an array of the same shape.
        tree: gradients from `value_and_grad`.
        rest: further gradients, or trees of floats with the same structure; each FP8 leaf is one leaf.

    Returns:
        A tree like `tree`. Where it has an FP8 gradient, `f` gets float32 values, and its result is rounded
        to nearest E4M3 on new power-of-two scales, with NaN in place of infinity. Each call rounds again: to
        sum many gradients call `accumulate_gradients`, or `f` with all of them at once.

    Raises:
        TypeError: arithmetic has changed codes and scales apart before; in compiled code the result is NaN.
    """
    for each in (tree, *rest):
        check_tags(each)

    def mapped(first: Any, *others: Any) -> Any:
        new = f(*(value(leaf) for leaf in (first, *others)))
        if not isinstance(first, ScaledGradient):
            return new
        made = ScaledGradient.of(quantize_gradient(jnp.asarray(new, jnp.float32), first.bits.shape))
        tags = [jnp.all(leaf.is_intact) for leaf in (first, *others) if isinstance(leaf, ScaledGradient)]
        return made.only_if(jnp.all(jnp.stack(tags)))

    return jax.tree.map(mapped, tree, *rest, is_leaf=is_scaled)
