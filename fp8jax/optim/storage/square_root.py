"""`Root`: a second moment stored as its root."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.optim.storage.base import Storage, encode_scaled, scaled_zeros
from fp8jax.quantization import ScaledArray, value
from fp8jax.quantization.exported import stored_by_export


@stored_by_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Root(Storage):
    """A second moment stored as its root: the value is `root * root`. `jnp.asarray` gives the value.

    FP16's 40 binades are then 80 of the value.
    """

    root: Any  # a `ScaledArray` of FP16

    name = "root of FP16"
    is_stochastic = True

    @classmethod
    def zeros(cls, param: Any, *, signed: bool) -> "Root":
        """Zeros with the scale blocks of the parameter."""
        return cls(scaled_zeros(param, formats.FP16))

    @property
    def scaled(self) -> ScaledArray:
        """The root."""
        return self.root

    def before_rounding(self, x: jax.Array) -> jax.Array:
        """The root of x."""
        return jnp.sqrt(x)

    def dequantize(self) -> jax.Array:
        """The value, float32."""
        return jnp.square(value(self.root))

    def encode(self, x: jax.Array, scale: Any, random: Any) -> "Root":
        """The root of x on the scale of the root."""
        return Root(encode_scaled(jnp.sqrt(x), self.root, scale, random))
