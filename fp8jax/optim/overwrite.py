"""A new value in the place of an update.

The rounding of a scaled parameter belongs to the optimizer, which knows the amax of its new
value before it writes it; a float32 update would have to be written out for every weight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.scaled import ScaledArray


@functools.partial(jax.tree_util.register_dataclass, data_fields=("bits", "scale", "is_new"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class Overwrite:
    """What replaces a `ScaledArray` parameter; made by `adam` and `adamw`, used by `apply_updates`.

    Its zeros mean "no update", so `optax.set_to_zero`, `optax.MultiSteps` and
    `optax.apply_if_finite` may put zeros in its place. What multiplies it or adds to it makes
    floats of its bits, which `onto` refuses.
    """

    bits: jax.Array  # uint8 or uint16: the codes
    scale: jax.Array  # float32, the parameter's scale shape
    is_new: jax.Array  # shape=(), bool: whether there is anything to replace

    @classmethod
    def by(cls, new: ScaledArray) -> "Overwrite":
        """The one that puts `new` in place."""
        # A constant: the compiler need not keep the old value for the case that it is False.
        return cls(to_bits(new.data), new.scale, jnp.ones((), bool))

    def onto(self, old: Any) -> ScaledArray:
        """The new value of a parameter, or the old one.

        Raises:
            TypeError: the parameter is no `ScaledArray` in the format of the new value, or
                something did arithmetic with this.
        """
        dtype = old.data.dtype if isinstance(old, ScaledArray) else getattr(old, "dtype", type(old))
        if not isinstance(old, ScaledArray) or self.bits.dtype != _bits_of(dtype):
            raise TypeError(
                f"`updates`: an optimizer made {self.bits.dtype} codes for a parameter of {dtype}. Nothing "
                "but zeros, which keep the old value, can take the place of a scaled parameter's new value: "
                "links that scale updates or add to them come before `adam` and `adamw`."
            )
        bits = jnp.where(self.is_new, self.bits, to_bits(old.data))
        return ScaledArray(
            lax.bitcast_convert_type(bits, dtype), jnp.where(self.is_new, self.scale, old.scale)
        )


def to_bits(codes: jax.Array) -> jax.Array:
    """Codes as integers of their width."""
    return lax.bitcast_convert_type(codes, _bits_of(codes.dtype))


def _bits_of(dtype: Any) -> Any:
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(jnp.dtype(dtype).itemsize, jnp.uint32))
