"""`ScaledGradient`: the FP8 gradient that `value_and_grad` returns, with a tag that arithmetic destroys.

Tree functions see codes and scales as two arrays. A sum of two gradients, leaf by leaf, would add codes on
different scales, and would add the scales' exponents. So the second leaf has a tag in the 23 mantissa bits
that a power of two leaves free:

    bits = 1, 8 bits exponent, 23 bits tag(exponent)

The tag is an odd number that depends on the exponent in no linear way. A sum or a mean loses the first bit.
Differences, integer factors, clips and casts give other bits, too. Without its tag a gradient reads as NaN:
optimizers raise, or where compiled code cannot raise they make the loss not a number (`optim.guard`).
"""

from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.quantization.array import ScaledArray, expand, is_scaled
from fp8jax.quantization.exported import stored_by_export
from fp8jax.quantization.scales import MIN_SCALE

# The scale of a gradient that lost its tag, in an optimizer. On it zeros are zeros, and any other code makes
# a second moment, or its root, larger than `ABSURD`. Its square is finite, because XLA may compute the square
# of a gradient as the square of codes times the square of the scale.
NO_TAG, ABSURD = 1.5 * 2.0**63, 2.0**40

_MANTISSA, _INFINITE, _ONE, _FIRST = (1 << 23) - 1, 0xFF << 23, 0x7F << 23, np.uint32(1 << 31)


class ShowsRemedy(type):
    """The metaclass of a class that is printed as its `remedy`: JAX names classes in errors of its own, as in
    one of trees that differ."""

    remedy: str

    def __repr__(cls) -> str:
        return cls.remedy


@stored_by_export
@jax.tree_util.register_pytree_with_keys_class
class ScaledGradient(ScaledArray, metaclass=ShowsRemedy):
    """A quantized weight gradient, `value = data * scale`.

    Attributes:
        data: E4M3 codes.
        scale: float32; NaN without a valid tag.
        bits: the exponent of the scale and its tag, uint32, in the shape of the scale: the second leaf.
        factor: float32 that multiplies the power of two, shape () or the scale's shape; None for 1.
        has_come: whether `value_and_grad` returned this object. Tree functions make objects without it.
    """

    remedy: ClassVar[str] = (
        "an FP8 gradient of fp8jax: take one of fp8jax.optim, or put optax's optimizer in "
        "fp8jax.optim.with_dequantized(...) or behind fp8jax.optim.dequantize(); for sums and other "
        "arithmetic call fp8jax.gradients.tree_map"
    )
    has_come: ClassVar[bool] = False
    factor: Any

    @classmethod
    def of(cls, q: ScaledArray, is_power_of_two: bool = True) -> "ScaledGradient":
        """The gradient with a tag; `is_power_of_two`: its scales are known to be powers of two."""
        scale = jnp.maximum(jnp.asarray(q.scale, jnp.float32), MIN_SCALE)
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        exponent, factor = bits >> 23, None
        if not is_power_of_two:
            factor = lax.bitcast_convert_type((bits & _MANTISSA) | _ONE, jnp.float32)
        new = cls.tree_unflatten(None, (q.data, _FIRST | (exponent << 23) | _tag(exponent), factor))
        object.__setattr__(new, "has_come", True)
        return new

    def times(self, factor: jax.Array) -> "ScaledGradient":
        """The gradient times a float32 scalar. The codes stay."""
        factor = factor if self.factor is None else self.factor * factor
        return type(self).tree_unflatten(None, (self.data, self.bits, factor))

    def only_if(self, is_intact: jax.Array) -> "ScaledGradient":
        """The gradient, without its tag unless `is_intact`."""
        bits = jnp.where(is_intact, self.bits, jnp.uint32(0))
        return type(self).tree_unflatten(None, (self.data, bits, self.factor))

    @property
    def is_intact(self) -> jax.Array:
        """Whether each scale has its tag; bool of the scale's shape."""
        if self.bits.dtype != jnp.uint32:
            raise TypeError(f"something changed codes and scales apart of {self.remedy}.")
        return _is_intact(self.bits)

    @property
    def scale(self) -> Any:
        """See the class."""
        if isinstance(self.bits, jax.ShapeDtypeStruct):
            return self.bits.update(dtype=jnp.float32)
        if not hasattr(self.bits, "dtype"):
            return self.bits  # what a tree function put there
        scale = jnp.where(self.is_intact, scale_of_bits(self.bits), jnp.nan)
        return scale if self.factor is None else scale * self.factor

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The value, computed in float32. Without a valid tag, all codes but zeros are NaN."""
        codes = self.data.astype(jnp.float32)
        return jnp.where(codes == 0, codes, codes * expand(self.scale, self.shape)).astype(dtype)

    def tree_flatten_with_keys(self) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        pairs, _ = super().tree_flatten_with_keys()
        return (*pairs, (jax.tree_util.GetAttrKey("factor"), self.factor)), None

    def tree_flatten(self) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return (self.data, self.bits, self.factor), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "ScaledGradient":
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        *pair, factor = children
        new: Any = super().tree_unflatten(aux, pair)
        vars(new)["factor"] = factor
        return new


def _tag(exponent: jax.Array) -> jax.Array:
    """23 bits: odd, and a quadratic function of the exponent modulo 2**32."""
    return ((((exponent + 77) * (exponent + 77) + 13) * jnp.uint32(0x9E3779B1)) >> 9) | 1


def _is_intact(bits: jax.Array) -> jax.Array:
    exponent = (bits & _INFINITE) >> 23
    return (bits >= _FIRST) & (exponent > 0) & ((bits & _MANTISSA) == _tag(exponent))


def scale_of_bits(bits: jax.Array) -> jax.Array:
    """The power of two in the bits of a `ScaledGradient`; `NO_TAG` without a valid tag."""
    scale = lax.bitcast_convert_type(bits & _INFINITE, jnp.float32)
    return jnp.where(_is_intact(bits), scale, NO_TAG)


def as_gradients(tree: Any) -> Any:
    """The tree with each `ScaledArray` as a `ScaledGradient`."""
    return jax.tree.map(lambda x: ScaledGradient.of(x) if is_scaled(x) else x, tree, is_leaf=is_scaled)


def like_gradient(old: Any, new: Any, is_power_of_two: bool) -> Any:
    """`new`, as a `ScaledGradient` if `old` is one, and without a tag if `old` has lost its own."""
    if not isinstance(old, ScaledGradient):
        return new
    made = ScaledGradient.of(new, is_power_of_two and old.factor is None)
    return made.only_if(jnp.all(old.is_intact))


def plain(leaf: Any) -> Any:
    """A `ScaledGradient` as a `ScaledArray`; other leaves unchanged.

    Without its tag the scale is `NO_TAG`.
    """
    if not isinstance(leaf, ScaledGradient):
        return leaf
    return ScaledArray(leaf.data, jnp.where(leaf.is_intact, leaf.scale, NO_TAG))
