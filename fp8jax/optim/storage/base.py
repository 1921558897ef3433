"""`Storage`, the interface of moments that are stored in more than one array and its scale."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np


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
