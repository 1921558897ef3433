"""E2M1 codes, two in a byte.

Some conversions of XLA's 4-bit floats on CPU are wrong, and others depend on its options. So codes are bytes
here, and become 4-bit floats (`floats`) for the GEMM of a GPU.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from fp8jax.formats import E2M1
from fp8jax.quantization.exported import stored_by_export
from fp8jax.quantization.rounding import codes_by_bits, stochastic_codes

# The named scope of the conversion of codes to floats: bytes do not tell their format.
DECODED = "e2m1"


@stored_by_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PackedE2M1:
    """E2M1 codes as the `data` of a `ScaledArray`; the last dim is even.

    Attributes:
        bytes: uint8, the shape with half the last dim; the first code is in the low four bits.
    """

    bytes: Any

    @classmethod
    def pack(cls, codes: UInt8[Array, "*rows columns"]) -> "PackedE2M1":
        """Codes in the low four bits of uint8."""
        pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
        return cls(pairs[..., 0] | (pairs[..., 1] << np.uint8(4)))

    @classmethod
    def cast(
        cls, x: Float[Array, "*rows columns"], random: UInt32[Array, "*rows columns"] | None = None
    ) -> "PackedE2M1":
        """Float32 `x` rounded to nearest even, or stochastically with random bits; saturating. Zeros have no
        sign, and NaN has no code."""
        return cls.pack(codes_of(x, random).astype(jnp.uint8))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return (*self.bytes.shape[:-1], 2 * self.bytes.shape[-1])

    @property
    def ndim(self) -> int:
        """Rank of the codes."""
        return self.bytes.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return int(self.bytes.nbytes)

    @property
    def dtype(self) -> Any:
        """The dtype of E2M1."""
        return E2M1.dtype

    @property
    def codes(self) -> UInt8[Array, "*rows columns"]:
        """The codes in the low four bits of uint8."""
        halves = jnp.stack([self.bytes & np.uint8(15), self.bytes >> np.uint8(4)], axis=-1)
        return halves.reshape(self.shape)

    @property
    def floats(self) -> Float[Array, "*rows columns"]:
        """The codes as 4-bit floats, for a GPU."""
        return lax.bitcast_convert_type(self.bytes, E2M1.dtype).reshape(self.shape)

    def astype(self, dtype: Any) -> Float[Array, "*rows columns"]:
        """The values of the codes."""
        with jax.named_scope(DECODED):
            codes = self.codes.astype(jnp.int32)
            exponent, fraction = (codes >> 1) & 3, codes & 1
            halves = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
            return (jnp.where(codes < 8, halves, -halves).astype(jnp.float32) / 2).astype(dtype)


def codes_of(x: Float[Array, "..."], random: UInt32[Array, "..."] | None = None) -> UInt32[Array, "..."]:
    """The codes of `PackedE2M1.cast`, not packed."""
    codes = codes_by_bits(x, E2M1) if random is None else stochastic_codes(x, E2M1, random)
    return jnp.where(x == 0, jnp.zeros_like(codes), codes)
