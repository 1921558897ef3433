"""A new value in the place of an update.

The rounding of a scaled parameter belongs to the optimizer, which knows the amax of its new
value before it writes it; a float32 update would have to be written out for every weight.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.remedy import ShowsRemedy
from fp8jax.scaled import ScaledArray, bits_of, to_bits


@functools.partial(jax.tree_util.register_dataclass, data_fields=("bits", "is_new"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class Overwrite(metaclass=ShowsRemedy):
    """What replaces an array when it is added to it; `adam` and `adamw` make a pair of them, codes and scale,
    for each `ScaledArray` parameter.

    Addition is the one thing that `optax.apply_updates` does, so that it, Flax's `TrainState` and
    `nnx.Optimizer` put a new value in place. Its zeros mean "no update", so `optax.set_to_zero`
    and the like may put zeros in its place. What multiplies it or adds to it makes floats of its
    bits, which are refused.
    """

    remedy: ClassVar[str] = (
        "the new value of a scaled weight: fp8jax.optim skips and counts steps that are not finite itself "
        "(fp8jax.optim.skipped), optax.apply_if_finite is not needed; for optax.MultiSteps take "
        "fp8jax.optim.multi_steps"
    )

    bits: Any  # unsigned integers of the array's width
    is_new: Any  # shape=(), bool: whether there is anything to replace

    # NumPy and JAX arrays leave an addition to this.
    __array_ufunc__ = None

    @classmethod
    def by(cls, new: ScaledArray) -> ScaledArray:
        """The pair that puts `new` in place."""
        # A constant: the compiler need not keep the old value for the case that it is False.
        return jax.tree.map(lambda array: cls(to_bits(array), jnp.ones((), bool)), new)

    def __radd__(self, old: Any) -> jax.Array:
        """The new value of an array, or the old one.

        Raises:
            TypeError: the array has not the new value's width, or something did arithmetic with this.
        """
        old = jnp.asarray(old)
        if old.dtype == jnp.uint16 and self.bits.dtype == jnp.uint32:  # a bfloat16 scale, a power of two
            return jnp.where(self.is_new, (self.bits >> 16).astype(jnp.uint16), old)
        if self.bits.dtype != bits_of(old.dtype):
            raise TypeError(
                f"`updates`: an optimizer made {self.bits.dtype} codes for a parameter of {old.dtype}. "
                "Nothing but zeros, which keep the old value, can take the place of a scaled parameter's "
                "new value: links that scale updates or add to them come before `adam` and `adamw`."
            )
        bits = jnp.where(self.is_new, self.bits, to_bits(old))
        return lax.bitcast_convert_type(bits, old.dtype)


def overwrites(update: Any) -> bool:
    """Whether an update is a pair made by `Overwrite.by`."""
    return isinstance(update, ScaledArray) and isinstance(update.data, Overwrite)
