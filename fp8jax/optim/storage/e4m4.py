"""`RootE4M4`: a second moment in one byte, stored as its root."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.formats import E4M4
from fp8jax.optim.storage.base import GROUP, Storage, exponents_of, first_exponents, per_entry, power_of_two
from fp8jax.quantization import is_scaled, stochastic_codes
from fp8jax.quantization.exported import stored_by_export


@stored_by_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RootE4M4(Storage):
    """A second moment stored as its root in E4M4, with a power-of-two scale for each 128 entries of a row.

        value = (E4M4(codes) * 2**(exponents - 127))**2

    A second moment has no sign, so that E4M4 has one bit of mantissa more than E4M3. It is rounded
    stochastically: rounded to nearest, any 8-bit second moment stalls. Only 0 is stored as 0: the smallest
    code stands for roots below it, down to which a group has a factor of 508,000. A second moment of 0 beside
    a first one that is not would be a step of m / eps.

    Invariants:
        `codes` is uint8 and has the array's shape;
        `exponents` is uint8; its last dimension has an entry for each 128 entries of the array's.
    """

    codes: Any
    exponents: Any

    name = "root of E4M4"
    group = GROUP
    instead = "Take moments=E5M2+FP16."
    is_stochastic = True

    @classmethod
    def zeros(cls, param: Any, *, signed: bool) -> "RootE4M4":
        """Zeros with the shape and sharding of the parameter."""
        like = param.data if is_scaled(param) else param
        return cls(jnp.zeros_like(like, jnp.uint8), first_exponents(like))

    def maxima(self, x: jax.Array) -> jax.Array:
        """The exponents of the new scales, uint8: the smallest with which no root is above E4M4's max."""
        return exponents_of(jnp.sqrt(x) / E4M4.max)

    def encode(self, x: jax.Array, scale: Any, random: Any) -> "RootE4M4":
        """The root of x on scales with these exponents, at least the smallest code for x above 0.

        Without random bits halves are rounded up.
        """
        root = jnp.sqrt(x) * power_of_two(254 - per_entry(scale, x.shape))
        half = jnp.full_like(x, 1 << 31, jnp.uint32)
        codes = stochastic_codes(root, E4M4, half if random is None else random)
        codes = jnp.maximum(codes, (x > 0).astype(codes.dtype))
        return RootE4M4(codes.astype(jnp.uint8), scale)

    def dequantize(self) -> jax.Array:
        """The value, float32."""
        # The bits of float16, whose exponents have a bias of 15 instead of 7.
        bits = self.codes.astype(jnp.uint16) << np.uint16(6)
        numbers = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**8
        return jnp.square(numbers * power_of_two(per_entry(self.exponents, self.shape)))
