"""Updates that replace the value of a quantized parameter.

The optimizer rounds the new value, because it computes the amax in the same pass. A float32 update would
cost a float32 copy of every weight.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.quantization import ScaledArray, bits_of, to_bits
from fp8jax.quantization.error_text import ShowsRemedy


@functools.partial(jax.tree_util.register_dataclass, data_fields=("bits", "is_new"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class ReplaceUpdate(metaclass=ShowsRemedy):
    """An update that replaces an array: `array + update` is the new value.

    For each `ScaledArray` parameter `adam` and `adamw` return a pair of these, for codes and scale.
    `optax.apply_updates` only adds, so this works with it, Flax's `TrainState` and `nnx.Optimizer`. All zeros
    mean "no update", so `optax.set_to_zero` works, too. Other arithmetic turns the bits into floats, which
    raises.
    """

    remedy: ClassVar[str] = (
        "the new value of a scaled weight: fp8jax.optim skips and counts steps that are not finite itself "
        "(fp8jax.optim.skipped), optax.apply_if_finite is not needed; for optax.MultiSteps take "
        "fp8jax.optim.multi_steps"
    )

    bits: Any  # unsigned integers with the array's bit width
    is_new: Any  # shape=(), bool: whether to replace the old value

    # Makes NumPy arrays call `__radd__`.
    __array_ufunc__ = None

    @classmethod
    def by(cls, new: ScaledArray) -> ScaledArray:
        """The pair of updates that replaces a parameter by `new`."""
        # `is_new` is a constant, so that XLA need not keep the old value.
        return jax.tree.map(lambda array: cls(to_bits(array), jnp.ones((), bool)), new)

    def __radd__(self, old: Any) -> jax.Array:
        """The new value, or `old` if `is_new` is False.

        Raises:
            TypeError: the bit widths differ, or another transformation did arithmetic on this update.
        """
        old = jnp.asarray(old)
        if old.dtype == jnp.uint16 and self.bits.dtype == jnp.uint32:  # a bfloat16 scale, a power of two
            return jnp.where(self.is_new, (self.bits >> 16).astype(jnp.uint16), old)
        if self.bits.dtype != bits_of(old.dtype):
            raise TypeError(
                f"`updates`: an optimizer made {self.bits.dtype} codes for a parameter of {old.dtype}. "
                "Nothing but zeros, which keep the old value, can take the place of a scaled parameter's "
                "new value: put transformations that change updates before `adam` and `adamw`."
            )
        bits = jnp.where(self.is_new, self.bits, to_bits(old))
        return lax.bitcast_convert_type(bits, old.dtype)


def replaces(update: Any) -> bool:
    """Whether an update is a pair from `ReplaceUpdate.by`."""
    return isinstance(update, ScaledArray) and isinstance(update.data, ReplaceUpdate)
