"""Updates that replace the value of a quantized parameter, and spoilt scales.

The optimizer rounds the new value, because it computes the amax in the same pass. A float32 update would
cost a float32 copy of every weight.

Compiled code cannot raise. It spoils the scales of weights that it must not change, so that the next loss is
NaN and no weight is lost. A spoilt scale is a NaN that holds the exponent of the scale, a power of two:

    sign, mantissa = the 8 bits of (exponent + 1)          # both for float32 and for bfloat16 scales
"""

import dataclasses
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.platforms import is_at_hand
from fp8jax.quantization import ScaledArray, bits_of, is_scaled, to_bits
from fp8jax.quantization.exported import stored_by_export
from fp8jax.quantization.gradient import ShowsRemedy

# Factors, sums, clips and casts of updates change it: it is above 16-bit codes, and small sums show in it.
_TAG = np.float32(2**22 - 0.5)


@stored_by_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ReplaceUpdate(metaclass=ShowsRemedy):
    """An update that replaces an array: `array + update` is the new value.

    For each `ScaledArray` parameter `adam` and `adamw` return a pair of these, for codes and scale.
    `optax.apply_updates` only adds, so this works with it, Flax's `TrainState` and `nnx.Optimizer`. All zeros
    mean "no update", so `optax.set_to_zero` works, too. Other arithmetic raises, because it makes the bits
    floats or changes the tag. Compiled code cannot raise: there it keeps the weight, with a `spoilt` scale.
    A change of the codes alone is found by `fp8jax.apply_updates`, not by `optax.apply_updates`.
    """

    remedy: ClassVar[str] = (
        "the new value of a scaled weight: fp8jax.optim skips and counts steps that are not finite itself "
        "(fp8jax.optim.skipped), optax.apply_if_finite is not needed; for optax.MultiSteps take "
        "fp8jax.optim.multi_steps"
    )

    bits: Any  # unsigned integers with the array's bit width
    tag: Any  # shape=(1, ..., 1), of the rank of the bits, float32

    # Makes NumPy arrays call `__radd__`.
    __array_ufunc__ = None

    @classmethod
    def by(cls, new: ScaledArray) -> ScaledArray:
        """The pair of updates that replaces a parameter by `new`."""
        # The tag is a constant, so that XLA need not keep the old value.
        return jax.tree.map(lambda array: cls(to_bits(array), jnp.full([1] * array.ndim, _TAG)), new)

    def __radd__(self, old: Any) -> jax.Array:
        """The new value; `old` if all of this update is zero.

        Raises:
            TypeError: the bit widths differ, or, outside of compiled code, the tag: another transformation
                did arithmetic on this update.
        """
        old = jnp.asarray(old)
        is_new, new = self.tag == _TAG, self.bits
        if old.dtype == jnp.uint16 and new.dtype == jnp.uint32:  # a bfloat16 scale, a power of two
            new = (new >> 16).astype(jnp.uint16)
        if new.dtype != bits_of(old.dtype):
            raise TypeError(f"`updates`: expected {bits_of(old.dtype)} codes; got {new.dtype}: {_CHANGED}")
        if self.tag.dtype != jnp.float32 or (is_at_hand(is_new) and not is_new.all() and self._is_changed()):
            raise TypeError(f"`updates`: expected an optimizer's new value; got a changed one: {_CHANGED}")
        if not jnp.issubdtype(old.dtype, jnp.unsignedinteger):
            return lax.bitcast_convert_type(jnp.where(is_new, new, to_bits(old)), old.dtype)
        is_zero = jnp.all(self.tag == 0) & jnp.all(new == 0)
        return jnp.where(is_new, new, jnp.where(is_zero, old, spoilt(old)))

    def _is_changed(self) -> bool:
        with jax.ensure_compile_time_eval():
            return not (bool(jnp.all(self.tag == 0)) and bool(jnp.all(self.bits == 0)))


_CHANGED = (
    "nothing but zeros, which keep the old value, can take the place of a scaled parameter's new value. Put "
    "transformations that change updates before `adam` and `adamw`."
)


def replaced(old: ScaledArray, update: Any) -> ScaledArray:
    """`old` with an update of which `replaces` is true; spoilt if codes and scale do not go together."""
    new: Any = jax.tree.map(operator.add, old, update)
    codes, scale = jax.tree.leaves(update, is_leaf=lambda node: isinstance(node, ReplaceUpdate))
    is_lost = jnp.any(codes.tag != scale.tag.reshape([-1] + [1] * (codes.tag.ndim - 1)))
    if is_at_hand(is_lost) and not is_lost:
        return new
    bits = jnp.where(is_lost, spoilt(jnp.asarray(old.bits)), new.bits)
    return type(old).tree_unflatten(None, (jnp.where(is_lost, old.data, new.data), bits))


def replaces(update: Any) -> bool:
    """Whether an update is a pair from `ReplaceUpdate.by`."""
    return isinstance(update, ScaledArray) and isinstance(update.data, ReplaceUpdate)


def refuse_replaced(updates: Any) -> None:
    """Raises TypeError if these are an optimizer's new values, and not gradients."""
    if any(map(replaces, jax.tree.leaves(updates, is_leaf=is_scaled))):
        raise TypeError(
            "`updates`: expected gradients; got the new values of scaled parameters, from an optimizer of "
            "fp8jax. Put transformations before `adam` and `adamw`, and take one of them."
        )


# Spoilt scales ####################################################################################


def spoilt(bits: jax.Array) -> jax.Array:
    """The bits of scales, uint32 or uint16, as NaNs that hold their exponents."""
    shift = 8 * bits.dtype.itemsize - 16
    top = (bits >> shift).astype(jnp.uint32)
    held = (top >> 7) + 1
    nan = (((held & 1) << 15) | 0x7F80 | (held >> 1)).astype(bits.dtype) << shift
    return jnp.where(is_spoilt(bits), bits, nan)


def is_spoilt(bits: jax.Array) -> jax.Array:
    """Whether these are bits of NaN."""
    top = bits >> (8 * bits.dtype.itemsize - 16)
    return ((top & 0x7F80) == 0x7F80) & ((top & 0x7F) != 0)


def restored(bits: jax.Array) -> jax.Array:
    """The inverse of `spoilt`; finite scales stay."""
    shift = 8 * bits.dtype.itemsize - 16
    top = (bits >> shift).astype(jnp.uint32)
    exponent = (((top & 0x7F) << 1) | (top >> 15)) - 1
    return jnp.where(is_spoilt(bits), (exponent << 7).astype(bits.dtype) << shift, bits)


def spoilt_scale(scale: jax.Array) -> jax.Array:
    """A float32 scale, `spoilt`."""
    return lax.bitcast_convert_type(spoilt(lax.bitcast_convert_type(scale, jnp.uint32)), jnp.float32)
