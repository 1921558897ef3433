"""The interface to sharded kernels: `dot_general` knows no mesh and calls it to gather and scatter."""

from typing import Any, Protocol

import jax


class KernelPlacement(Protocol):
    """Collectives for a kernel that may be sharded, see `fp8jax.comm.shard`."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole kernel; `shape` is the shape of this device's shard."""
        ...

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """The amax of the whole kernel; `amax` is the amax of this device's shard."""
        ...

    def gathered(self, part: Any) -> Any:
        """All-gathers the kernel, in the format of the shard."""
        ...

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """`operands` and `grad`, with a dependency that delays the all-gather for the backward GEMMs until
        `grad` is computed."""
        ...

    def scattered(self, grad: jax.Array, *, as_codes: bool) -> Any:
        """Reduce-scatters the gradient: float32, or with `as_codes` an E4M3 `ScaledArray`."""
        ...


class Whole:
    """The placement of a kernel that is not sharded."""

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
