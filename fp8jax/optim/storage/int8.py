"""`LinearInt8`: the momentum of Muon in one byte."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.optim.storage.base import GROUP, Storage, exponents_of, first_exponents, per_entry, power_of_two
from fp8jax.quantization import is_scaled
from fp8jax.quantization.exported import stored_by_export

_MAX = 127


@stored_by_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LinearInt8(Storage):
    """An array as integers from -127 to 127, with a power-of-two scale for each 128 entries of a row.

        value = codes * 2**(exponents - 127)

    Errors of equal size, not relative to the entry: Muon amplifies small singular values, and what fills them
    is the error of the matrix as a whole. Of a matrix of normal entries that error is 1%; in E5M2 it is 8%.

    Invariants:
        `codes` is int8 and has the array's shape;
        `exponents` is uint8; its last dimension has an entry for each 128 entries of the array's.
    """

    codes: Any
    exponents: Any

    name = "INT8 groups"
    group = GROUP
    instead = "Leave the parameter to Adam, by `weight_dimension_numbers`, or take stage 0."

    @classmethod
    def zeros(cls, param: Any, *, signed: bool) -> "LinearInt8":
        """Zeros with the shape and sharding of the parameter."""
        like = param.data if is_scaled(param) else param
        return cls(jnp.zeros_like(like, jnp.int8), first_exponents(like))

    def maxima(self, x: jax.Array) -> jax.Array:
        """The exponents of the new scales, uint8."""
        return exponents_of(jnp.abs(x) / _MAX)

    def encode(self, x: jax.Array, scale: Any, random: Any) -> "LinearInt8":
        """x on scales with these exponents."""
        codes = x * power_of_two(254 - per_entry(scale, x.shape))
        uniform = 0.5 if random is None else (random >> np.uint32(8)) * np.float32(2.0**-24)
        codes = jnp.clip(jnp.floor(codes + uniform), -_MAX, _MAX)
        return LinearInt8(codes.astype(jnp.int8), scale)

    def dequantize(self) -> jax.Array:
        """The value, float32."""
        return self.codes.astype(jnp.float32) * power_of_two(per_entry(self.exponents, self.shape))
