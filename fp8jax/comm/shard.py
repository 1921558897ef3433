"""Sharded kernels of dots: all-gather in the storage format, and reduce-scatter of gradients in FP8."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.comm import buckets
from fp8jax.comm.gather import whole_from_parts
from fp8jax.comm.reduce import reduced_codes, reduced_floats
from fp8jax.comm.zero import Zero


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """The sharding of one kernel; a `fp8jax.dot.weight.KernelSharding`."""

    axis_name: str
    axis: int  # negative, so that it is the same for one layer of a stack
    devices: int
    comm: str  # format in which gradients are sent
    is_part: bool  # whether the kernel is sharded; otherwise only its gradient is

    @classmethod
    def of(cls, zero: Zero, axis: int, comm: str, *, in_dots_only: bool) -> "ShardSpec | None":
        """The sharding of a kernel whose gradient the dot's backward reduces; None below stage 2.

        Args:
            zero: the mesh and the stage.
            axis: its sharded axis, see `Zero.split_of`.
            comm: the format in which its gradient is sent.
            in_dots_only: whether dots alone use it. Each dot then gathers a sharded kernel, for each of its
                GEMMs; otherwise it is gathered once.
        """
        if not zero.shards_gradients:
            return None
        return cls(zero.axis, axis, zero.devices, comm, zero.shards_weights and in_dots_only)

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
        return whole_from_parts([part], [self.axis], self.axis_name)[0] if self.is_part else part

    def gathered_runs(self, parts: list[jax.Array], axis: int, runs: int) -> list[jax.Array]:
        """All-gathers arrays along a negative axis that consists of sharded runs."""

        def in_runs(x: jax.Array) -> jax.Array:
            at = axis % x.ndim
            return x.reshape(*x.shape[:at], runs, x.shape[at] // runs, *x.shape[at + 1 :])

        def joined(x: jax.Array) -> jax.Array:
            at = axis % x.ndim
            return x.reshape(*x.shape[: at - 1], runs * x.shape[at], *x.shape[at + 1 :])

        whole = whole_from_parts(list(map(in_runs, parts)), [axis] * len(parts), self.axis_name)
        return list(map(joined, whole))

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """`operands` and `grad` behind a barrier, which delays the all-gather of a sharded kernel until
        `grad` is computed, to save memory."""
        return lax.optimization_barrier((operands, grad)) if self.is_part else (operands, grad)

    def scattered(self, grad: jax.Array, *, in_fp8: bool) -> Any:
        """Reduce-scatters (sums) the gradient of a kernel, inside the backward.

        Args:
            grad: this device's gradient of the whole kernel, a float array.
            in_fp8: whether to return an E4M3 `ScaledArray`, with one scale for the whole kernel, or a
                float32 array.
        """
        if self.comm == "FP8":
            codes = buckets.on_common_scales([grad], self.axis_name)
            [part] = reduced_codes(codes, [self.axis], self.axis_name, "sum")
            return part if in_fp8 else part.dequantize()
        dtype = formats.get(self.comm).dtype
        [part] = reduced_floats([grad.astype(jnp.float32)], [self.axis], self.axis_name, dtype, "sum")
        return buckets.on_common_scales([part], self.axis_name)[0] if in_fp8 else part
