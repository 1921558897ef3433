"""`Storage`, the interface of moments that are stored in more than one array and its scale; and its parts.

`scaled_zeros` and `encode_scaled` are for moments in a `ScaledArray`, on the scale blocks of the parameter.
`exponents_of` and `per_entry` are for scales of groups: a power of two for each `GROUP` entries of an array's
last axis, stored as a biased exponent in uint8.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax import formats
from fp8jax.quantization import ScaledArray, cast, cast_stochastically, expand, format_of, is_scaled


@dataclasses.dataclass(frozen=True, eq=False)
class Storage(abc.ABC):
    """A moment in a storage of its own. `jnp.asarray` gives its value.

    A subclass is a frozen dataclass and a pytree. Its first field holds the codes, in the shape of the
    moment. An optimizer step encodes the new moment in two passes over all parameters:

        scale = stored.maxima(x)                      # first pass; or the step's scale of `stored.scaled`
        new = stored.encode(x, scale, random)         # second pass

    Both passes compute x, so that a GPU stores no float32 copy of it.
    """

    # The name in `STORAGES`, in errors and in the chart.
    name: ClassVar[str]
    # Consecutive entries of a row that have a scale together, so that they cannot be on two devices.
    group: ClassVar[int] = 1
    # What to take where devices would cut such groups, in an error.
    instead: ClassVar[str] = "Take stage 0, or a parameter of other dims."
    # Whether `encode` rounds stochastically if it gets random bits.
    is_stochastic: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def zeros(cls, param: Any, *, signed: bool) -> "Storage":
        """Zeros with the shape and sharding of a parameter, an array or a `ScaledArray`.

        Args:
            param: the parameter.
            signed: whether values can be negative; False for second moments.
        """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(getattr(self, dataclasses.fields(self)[0].name).shape)

    @abc.abstractmethod
    def dequantize(self) -> jax.Array:
        """The value, float32."""

    @abc.abstractmethod
    def encode(self, x: jax.Array, scale: Any, random: Any) -> "Storage":
        """A new value in this storage.

        Args:
            x: the new value, float32.
            scale: `maxima(x)`, or the new scale of `scaled`.
            random: uniform random bits, uint32, in the shape of x; None rounds to nearest.
        """

    @property
    def scaled(self) -> Any:
        """The `ScaledArray` inside, whose scale the step computes together with all others; None if the
        storage computes its scales from `maxima`."""
        return None

    def before_rounding(self, x: jax.Array) -> jax.Array:
        """The value whose amax gives the scale of `scaled`."""
        return x

    def maxima(self, x: jax.Array) -> Any:
        """The scales of the new value, or what `encode` computes them from; None with `scaled`."""
        return None

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.dequantize(), dtype)


def is_stored(node: Any) -> bool:
    """Whether a tree node is one moment: a `ScaledArray` or a `Storage`."""
    return is_scaled(node) or isinstance(node, Storage)


# Moments as `ScaledArray`s #######################################################################


def scaled_zeros(param: Any, format: formats.Format) -> ScaledArray:
    """Zeros in a format, with the shape, scale blocks and sharding of a parameter."""
    data = jnp.zeros_like(param.data if is_scaled(param) else param, format.dtype)
    return ScaledArray(data, jnp.ones(param.scale.shape if is_scaled(param) else (), jnp.float32))


def encode_scaled(x: jax.Array, stored: ScaledArray, scale: jax.Array, random: Any = None) -> ScaledArray:
    """`x`, float32, in the format of `stored` on a new scale.

    `random` are bits for stochastic rounding; None rounds to nearest.
    """
    codes, format = x * expand(1 / scale, x.shape), format_of(stored)
    data = cast(codes, format) if random is None else cast_stochastically(codes, format, random)
    return ScaledArray(data, scale)


# Scales of groups #################################################################################

GROUP = 128  # entries of a row that share a scale


def first_exponents(like: jax.Array) -> jax.Array:
    """Exponents of scales 1 for an array: uint8, an entry of the last axis for each 128 of the array's."""
    return jnp.full(_grouped(jnp.zeros(like.shape, jnp.uint8)).shape[:-1], 127, jnp.uint8)


def exponents_of(x: jax.Array) -> jax.Array:
    """The exponents of the smallest scales that are not less than any entry of their group.

    `x` is float32 and has no sign; inf and NaN give the largest exponent.
    """
    # The exponent of each entry, rounded up, because XLA computes nothing in the kernel of a reduction after
    # it.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponents = jnp.clip((bits + np.uint32((1 << 23) - 1)) >> np.uint32(23), 1, 253).astype(jnp.uint8)
    return jnp.max(_grouped(exponents), axis=-1)


def per_entry(exponents: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The exponent of each entry's group in an array of this shape, uint32."""
    columns = shape[-1] if shape else 1
    size = max(1, min(GROUP, columns))
    # Indices, because XLA on a GPU starts a kernel for what it can compute before a broadcast.
    groups = lax.iota(jnp.int32, columns) // size
    exponents = jnp.asarray(exponents)  # of NumPy in a state on the host
    return exponents.at[..., groups].get(mode="promise_in_bounds").reshape(shape).astype(jnp.uint32)


def power_of_two(exponents: jax.Array) -> jax.Array:
    """2 to the power of biased exponents, float32."""
    return lax.bitcast_convert_type(exponents << np.uint32(23), jnp.float32)


def _grouped(x: jax.Array) -> jax.Array:
    """`x` with its last dimension in groups, shape=(..., groups, entries of a group); padded with zeros."""
    x = x.reshape(x.shape or (1,))
    columns = x.shape[-1]
    size = max(1, min(GROUP, columns))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -columns % size)]) if columns % size else x
    return x.reshape(*x.shape[:-1], -(-columns // size), size)
