"""Sharded kernels of dots: all-gather in the storage format, and reduce-scatter of gradients in FP8."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.comm import wire
from fp8jax.comm.gather import whole_from_parts
from fp8jax.comm.reduce import from_row, on_shared_scale, rows_for_devices, wide_part
from fp8jax.quantization import ScaledArray, is_scaled, to_bits


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """The sharding of one kernel; a `fp8jax.dot.placement.KernelPlacement`."""

    axis_name: str
    axis: int  # negative, so that it is the same for one layer of a stack
    devices: int
    comm: str  # format in which gradients are sent
    is_part: bool  # whether the kernel is sharded; otherwise only its gradient is

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole kernel; `shape` is the shape of a device's shard."""
        if not self.is_part:
            return shape
        axis = self.axis % len(shape)
        return (*shape[:axis], shape[axis] * self.devices, *shape[axis + 1 :])

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """The amax of the whole kernel."""
        return lax.pmax(amax, self.axis_name) if self.is_part else amax

    def gathered(self, part: Any) -> Any:
        """All-gathers the kernel in its storage format; the shards of a `ScaledArray` share a scale."""
        if not self.is_part:
            return part
        data = part.data if is_scaled(part) else part
        [bits] = whole_from_parts([to_bits(data)], [self.axis], self.axis_name)
        data = lax.bitcast_convert_type(bits, data.dtype)
        return ScaledArray(data, part.scale) if is_scaled(part) else data

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """`operands` and `grad` behind a barrier, which delays the all-gather of a sharded kernel until
        `grad` is computed, to save memory."""
        return lax.optimization_barrier((operands, grad)) if self.is_part else (operands, grad)

    def scattered(self, grad: jax.Array, *, as_codes: bool) -> Any:
        """Reduce-scatters (sums) the gradient of a kernel, inside the backward.

        Args:
            grad: this device's gradient of the whole kernel, a float array.
            as_codes: whether to return an E4M3 `ScaledArray`, with one scale for the whole kernel, or a
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
