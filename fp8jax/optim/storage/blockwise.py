"""Blockwise 8-bit quantization: codes of the dynamic map, and an absmax for each block of 256 entries.

    value = map[code] * absmax

    >>> import jax.numpy as jnp
    >>> from fp8jax.optim.storage.blockwise import Blockwise
    >>> x = Blockwise.of(jnp.array([1e-6, -0.3, 2.0]), signed=True)
    >>> x.codes.dtype, x.absmax.shape
    (dtype('uint8'), (1,))
    >>> [float(f"{v:.2g}") for v in x.dequantize()]
    [1.1e-06, -0.3, 2.0]

The signed map covers seven decades of [-1, 1], the unsigned map of [0, 1]. Each decade has twice the codes of
the decade below it: the signed map has 1 in (1e-7, 1e-6] and 64 in (0.1, 1], the unsigned map 2 and 128. The
codes are the midpoints of equal intervals of the decade. 0 and 1 are codes, too.

References:
    8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, sections 2.1 and 2.2; bitsandbytes,
    `create_dynamic_map` and `quantize_blockwise`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.optim.storage.base import Storage
from fp8jax.quantization import is_scaled
from fp8jax.quantization.exported import stored_by_export

BLOCK = 256  # entries that share an absmax

_DECADES = 7
# Neighbouring codes have a relative distance of at least 1/128. So floats that agree in sign, exponent and
# this many bits of the mantissa have at most one midpoint between them.
_MANTISSA_BITS = 8
_SHIFT = 23 - _MANTISSA_BITS
# All midpoints are between 2**-23 (the smallest is 1.6e-7) and 1.
_LEAST = (127 - 23) << _MANTISSA_BITS
_BUCKETS = (127 << _MANTISSA_BITS) + 1 - _LEAST


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray[Any, Any]:
    """The values of the codes, shape=(256,), float32, ascending, from -0.993 or 0 to 1.

    The map equals bitsandbytes' bit for bit: interval bounds are rounded to float32, and midpoints are
    rounded before and after they are multiplied by the power of ten.
    """
    values = [np.array([0, 1], np.float32)]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        steps = np.arange(parts + 1)
        step = (np.float32(1) - np.float32(0.1)) / np.float32(parts)
        # Computed from the nearer end, as `torch.linspace` does.
        up, down = float(np.float32(0.1)) + float(step) * steps, 1 - float(step) * (parts - steps)
        bounds = np.where(steps < (parts + 1) // 2, up, down).astype(np.float32)
        means = np.float32(10.0 ** (decade - _DECADES + 1)) * ((bounds[1:] + bounds[:-1]) / np.float32(2))
        values += [means, -means] if signed else [means]
    return np.sort(np.concatenate(values))


@stored_by_export
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Blockwise(Storage):
    """An array quantized blockwise to 8 bits. `jnp.asarray` dequantizes it.

    Invariants:
        `codes` is uint8 and has the array's shape;
        `absmax` is float32, with an entry for each `BLOCK` entries in row-major order. The last block may be
        shorter.
    """

    codes: Any
    absmax: Any  # shape=(blocks,)
    signed: bool = dataclasses.field(default=True, metadata={"static": True})

    name = "8-bit blocks"

    @classmethod
    def of(cls, x: jax.Array, signed: bool, absmax: Any = None) -> "Blockwise":
        """Quantizes a float32 array to the nearest codes; ties go to the lower code.

        Args:
            x: any shape; not negative unless `signed`. Infinities and NaN have no code.
            signed: whether to use the signed map.
            absmax: `block_absmax(x)`, where it is already known.
        """
        absmax = block_absmax(x) if absmax is None else absmax
        blocks = in_blocks(x)
        # The reciprocal of a zero or subnormal absmax is not finite and would give NaN.
        inverse = jnp.where(absmax >= np.finfo(np.float32).tiny, 1 / absmax, 0)
        codes = _nearest(jnp.clip(blocks * inverse[:, None], -1, 1), signed)
        return cls(codes.reshape(-1)[: x.size].reshape(x.shape), absmax, signed)

    @classmethod
    def zeros(cls, param: Any, *, signed: bool) -> "Blockwise":
        """Zeros with the shape and sharding of the parameter."""
        like = param.data if is_scaled(param) else param
        zero = int(np.searchsorted(dynamic_map(signed), 0.0))
        blocks = -(-like.size // BLOCK)
        return cls(jnp.full_like(like, zero, jnp.uint8), jnp.zeros(blocks, jnp.float32), signed)

    def maxima(self, x: jax.Array) -> jax.Array:
        """The `block_absmax` of x."""
        return block_absmax(x)

    def encode(self, x: jax.Array, scale: Any, random: Any = None) -> "Blockwise":
        """`of`, with the same map."""
        return Blockwise.of(x, self.signed, scale)

    def dequantize(self) -> jax.Array:
        """The value, float32."""
        values = jnp.asarray(dynamic_map(self.signed))[in_blocks(self.codes).astype(jnp.int32)]
        return (values * self.absmax[:, None]).reshape(-1)[: self.codes.size].reshape(self.shape)


def block_absmax(x: jax.Array) -> jax.Array:
    """The absmax of each block of `x`, shape=(blocks,), float32; NaN for a block with a NaN."""
    return jnp.max(jnp.abs(in_blocks(x)), axis=1)


def in_blocks(x: jax.Array) -> jax.Array:
    """`x` as rows of `BLOCK` entries, the last row padded with zeros."""
    return jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)


def _nearest(x: jax.Array, signed: bool) -> jax.Array:
    """The nearest codes to numbers in [-1, 1], uint8."""
    below, midpoints = _buckets(signed)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    place = jnp.clip(((bits & 0x7FFFFFFF) >> _SHIFT) - _LEAST, 0, _BUCKETS - 1)
    place = place + jnp.where(bits < 0, _BUCKETS, 0)
    return jnp.asarray(below)[place] + (x > jnp.asarray(midpoints)[place]).astype(jnp.uint8)


@functools.cache
def _buckets(signed: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For each bucket, positive buckets first: the code nearest to the bucket's lower end, and the midpoint
    above which the next code is nearest."""
    codes = dynamic_map(signed).astype(np.float64)
    exact = (codes[1:] + codes[:-1]) / 2
    # Rounded down, so that a float32 is above the exact midpoint if and only if it is above this.
    midpoints = exact.astype(np.float32)
    midpoints = np.where(midpoints > exact, np.nextafter(midpoints, np.float32(-2)), midpoints)
    starts = ((np.arange(_BUCKETS + 1, dtype=np.int32) + _LEAST) << _SHIFT).view(np.float32)
    starts[0] = 0
    negative = np.nextafter(-starts[1:], np.float32(0)).astype(np.float32)  # lower ends
    ends = np.concatenate([starts[:-1], negative])
    below = np.searchsorted(midpoints, ends, side="left")
    return below.astype(np.uint8), np.append(midpoints, np.float32(2))[below]
