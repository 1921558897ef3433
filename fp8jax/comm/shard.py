"""A kernel split over devices, as its dot product takes it: gathered in FP8, its gradient scattered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.comm import wire
from fp8jax.comm.gather import whole_from_parts
from fp8jax.comm.reduce import from_row, on_shared_scale, rows_for_devices, wide_part
from fp8jax.scaled import ScaledArray, is_scaled, to_bits


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """How one kernel is split over devices; a `fp8jax.dot.KernelPlacement`."""

    axis_name: str
    axis: int  # from the end, so that it is the same for one layer of a stack
    devices: int
    comm: str  # format of gradients on the wire
    is_part: bool  # whether the kernel itself is this device's part, or only its gradient will be

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole kernel, of which a device has `shape`."""
        if not self.is_part:
            return shape
        axis = self.axis % len(shape)
        return (*shape[:axis], shape[axis] * self.devices, *shape[axis + 1 :])

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """The amax of the whole kernel."""
        return lax.pmax(amax, self.axis_name) if self.is_part else amax

    def gathered(self, part: Any) -> Any:
        """The whole kernel, an array or a `ScaledArray` whose parts share a scale, as it is stored."""
        if not self.is_part:
            return part
        data = part.data if is_scaled(part) else part
        [bits] = whole_from_parts([to_bits(data)], [self.axis], self.axis_name)
        data = lax.bitcast_convert_type(bits, data.dtype)
        return ScaledArray(data, part.scale) if is_scaled(part) else data

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """The operands of the backward GEMMs once there is an output gradient: no sooner is a kernel
        gathered, so that it does not wait in memory."""
        return lax.optimization_barrier((operands, grad)) if self.is_part else (operands, grad)

    def scattered(self, grad: jax.Array, *, as_codes: bool) -> Any:
        """This device's part of the sum of a kernel's gradients, as soon as there is one.

        Args:
            grad: float array, of the whole kernel.
            as_codes: whether the part is an E4M3 `ScaledArray`, on one scale for the whole kernel, or a
                float32 array.
        """
        axis, name = self.axis, self.axis_name
        if self.comm != "FP8":
            dtype = formats.get(self.comm).dtype
            part = wide_part(grad.astype(jnp.float32), name, dtype, "sum", axis)
            return on_shared_scale(part, (), name) if as_codes else part
        [q] = wire.narrowed([grad], name)
        [mean] = wire.means_of_parts([rows_for_devices(q, axis, self.devices)], name)
        mean = from_row(mean, q.shape, axis, self.devices)
        part = ScaledArray(wire.from_bytes(mean), q.scale * self.devices)
        return part if as_codes else part.dequantize()
