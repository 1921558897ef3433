"""An FP8 gradient on its way to an optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.remedy import ShowsRemedy
from fp8jax.scaled.array import ScaledArray, is_scaled


@jax.tree_util.register_pytree_with_keys_class
class ScaledGradient(ScaledArray, metaclass=ShowsRemedy):
    """A `ScaledArray` whose scale goes through trees as an integer, its bits.

    What knows no scaled gradients acts on codes and on scale apart: half of both would be a quarter of the
    value. Here it makes a float of the bits, which is refused where the scale is read. Zeros stay zeros, so
    `optax.set_to_zero` makes a scale of 0, which no gradient has: it is no step.

    Attributes:
        data: as in `ScaledArray`.
        bits: those of the scale, uint32.
        has_come: whether it is as `value_and_grad` gave it, and went through no tree since.
    """

    remedy = (
        "an FP8 gradient of fp8jax: take one of fp8jax.optim, or put optax's optimizer in "
        "fp8jax.optim.on_values(...) or behind fp8jax.optim.dequantize()"
    )
    bits: Any
    has_come: bool

    def __init__(self, data: Any, bits: Any, has_come: bool = False):
        for name, given in (("data", data), ("bits", bits), ("has_come", has_come)):
            object.__setattr__(self, name, given)

    @property
    def scale(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The scale, float32.

        Raises:
            TypeError: something did arithmetic with the bits.
        """
        dtype = getattr(self.bits, "dtype", None)
        if dtype is None:
            return self.bits  # no array: a sharding, say
        if dtype != jnp.uint32:
            raise TypeError(
                f"`updates`: something that acts on codes and on scales apart changed {type(self).remedy}."
            )
        if isinstance(self.bits, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.bits.shape, jnp.float32)
        return lax.bitcast_convert_type(self.bits, jnp.float32)

    def tree_flatten_with_keys(self) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        data, scale = map(jax.tree_util.GetAttrKey, ("data", "scale"))
        return ((data, self.data), (scale, self.bits)), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ScaledGradient":
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        del aux
        return cls(*children)

    def __reduce__(self) -> Any:
        return ScaledGradient, (self.data, self.bits)


def as_gradients(tree: Any) -> Any:
    """The tree with `ScaledGradient`s in the place of `ScaledArray`s."""

    def one(leaf: Any) -> Any:
        if not is_scaled(leaf):
            return leaf
        return ScaledGradient(leaf.data, lax.bitcast_convert_type(leaf.scale, jnp.uint32), has_come=True)

    return jax.tree.map(one, tree, is_leaf=is_scaled)


def like_gradient(old: ScaledArray, new: ScaledArray) -> ScaledArray:
    """`new`, as a `ScaledGradient` if `old` is."""
    return as_gradients(new) if isinstance(old, ScaledGradient) else new


def plain(leaf: Any) -> Any:
    """A `ScaledGradient` as the `ScaledArray` that it stands for; others as they are."""
    return ScaledArray(leaf.data, leaf.scale) if isinstance(leaf, ScaledGradient) else leaf
