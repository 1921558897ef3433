"""`ScaledGradient`: the FP8 gradient that `value_and_grad` returns."""

from typing import Any, ClassVar

import jax

from fp8jax.quantization.array import ScaledArray, is_scaled
from fp8jax.remedy import ShowsRemedy


@jax.tree_util.register_pytree_with_keys_class
class ScaledGradient(ScaledArray, metaclass=ShowsRemedy):
    """A quantized weight gradient.

    A scale of 0, which only `optax.set_to_zero` makes, means "no step".

    Attributes:
        data, scale: as in `ScaledArray`.
        has_come: whether `value_and_grad` returned this object. Tree functions make objects without it.
    """

    remedy: ClassVar[str] = (
        "an FP8 gradient of fp8jax: take one of fp8jax.optim, or put optax's optimizer in "
        "fp8jax.optim.with_dequantized(...) or behind fp8jax.optim.dequantize()"
    )
    has_come: ClassVar[bool] = False

    @classmethod
    def come(cls, q: ScaledArray) -> "ScaledGradient":
        """The gradient as `value_and_grad` returns it."""
        new = cls.tree_unflatten(None, (q.data, q.bits))
        object.__setattr__(new, "has_come", True)
        return new


def as_gradients(tree: Any) -> Any:
    """The tree with each `ScaledArray` as a `ScaledGradient`."""
    return jax.tree.map(lambda x: ScaledGradient.come(x) if is_scaled(x) else x, tree, is_leaf=is_scaled)


def like_gradient(old: ScaledArray, new: ScaledArray) -> ScaledArray:
    """`new`, as a `ScaledGradient` if `old` is one."""
    return as_gradients(new) if isinstance(old, ScaledGradient) else new


def plain(leaf: Any) -> Any:
    """A `ScaledGradient` as a `ScaledArray`; other leaves unchanged."""
    return ScaledArray(leaf.data, leaf.scale) if isinstance(leaf, ScaledGradient) else leaf
