"""Where a kernel is, for a dot product that knows no mesh."""

from typing import Any, Protocol

import jax


class KernelPlacement(Protocol):
    """What a dot product asks of a kernel that may be split over devices, see `fp8jax.comm.shard`."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole kernel, of which this device stores `shape`."""
        ...

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """The amax of the whole kernel, of that of this device's part."""
        ...

    def gathered(self, part: Any) -> Any:
        """The whole kernel, in the format of the part."""
        ...

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """What the backward GEMMs take, before a kernel is gathered for them."""
        ...

    def scattered(self, grad: jax.Array, *, as_codes: bool) -> Any:
        """This device's part of the summed gradient: float32, or with `as_codes` an E4M3 `ScaledArray`."""
        ...


class Whole:
    """A kernel that is whole on this device."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `KernelPlacement`."""
        return shape

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """See `KernelPlacement`."""
        return amax

    def gathered(self, part: Any) -> Any:
        """See `KernelPlacement`."""
        return part

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """See `KernelPlacement`."""
        return operands, grad

    def scattered(self, grad: jax.Array, *, as_codes: bool) -> Any:
        """See `KernelPlacement`."""
        del as_codes
        return grad


WHOLE = Whole()
