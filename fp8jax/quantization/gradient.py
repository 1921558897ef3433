"""An FP8 gradient on its way to an optimizer."""

from typing import Any, ClassVar

import jax

from fp8jax.quantization.array import ScaledArray, is_scaled
from fp8jax.remedy import ShowsRemedy


@jax.tree_util.register_pytree_with_keys_class
class ScaledGradient(ScaledArray, metaclass=ShowsRemedy):
    """A weight gradient in FP8, as `value_and_grad` gives it.

    Zeros stay zeros, so `optax.set_to_zero` makes a scale of 0, which no gradient has: it is no step.

    Attributes:
        data, scale: as in `ScaledArray`.
        has_come: whether it is as `value_and_grad` gave it, and went through no tree since.
    """

    remedy: ClassVar[str] = (
        "an FP8 gradient of fp8jax: take one of fp8jax.optim, or put optax's optimizer in "
        "fp8jax.optim.with_dequantized(...) or behind fp8jax.optim.dequantize()"
    )
    has_come: ClassVar[bool] = False

    @classmethod
    def come(cls, q: ScaledArray) -> "ScaledGradient":
        """The gradient before anything else saw it."""
        new = cls.tree_unflatten(None, (q.data, q.bits))
        object.__setattr__(new, "has_come", True)
        return new


def as_gradients(tree: Any) -> Any:
    """The tree with `ScaledGradient`s in the place of `ScaledArray`s."""
    return jax.tree.map(lambda x: ScaledGradient.come(x) if is_scaled(x) else x, tree, is_leaf=is_scaled)


def like_gradient(old: ScaledArray, new: ScaledArray) -> ScaledArray:
    """`new`, as a `ScaledGradient` if `old` is."""
    return as_gradients(new) if isinstance(old, ScaledGradient) else new


def plain(leaf: Any) -> Any:
    """A `ScaledGradient` as the `ScaledArray` that it stands for; others as they are."""
    return ScaledArray(leaf.data, leaf.scale) if isinstance(leaf, ScaledGradient) else leaf
