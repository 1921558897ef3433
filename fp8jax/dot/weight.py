"""`Weight`: a kernel with a separate gradient; and the interface to sharded kernels."""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.quantization import ScaledArray, value
from fp8jax.scaling.merge import from_fp8_grad, zero_fp8_grad


class KernelSharding(Protocol):
    """The sharding of a kernel, with the collectives of its dot: the dot itself knows no mesh.

    The methods here are those of a kernel that is not sharded; `fp8jax.comm.shard` has the others.
    """

    is_part: bool = False  # whether the kernel is sharded
    axis: int = -1  # the sharded axis, negative
    devices: int = 1

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole kernel; `shape` is the shape of this device's shard."""
        return shape

    def common_amax(self, amax: jax.Array) -> jax.Array:
        """The amax of the whole kernel; `amax` is the amax of this device's shard."""
        return amax

    def gathered(self, part: Any) -> Any:
        """All-gathers the kernel, in the format of the shard."""
        return part

    def gathered_runs(self, parts: list[jax.Array], axis: int, runs: int) -> list[jax.Array]:
        """All-gathers arrays along a negative axis of sharded runs, see `layout.MatrixShard`."""
        del axis, runs
        return parts

    def after(self, operands: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
        """`operands` and `grad`, with a dependency that delays the all-gather for the backward GEMMs until
        `grad` is computed."""
        return operands, grad

    def scattered(self, grad: jax.Array, *, in_fp8: bool) -> Any:
        """Reduce-scatters the gradient: float32, or with `in_fp8` an E4M3 `ScaledArray`."""
        del in_fp8
        return grad


class _NotSharded(KernelSharding):
    pass


WHOLE = _NotSharded()


class GradSlot(NamedTuple):
    """Zeros for the FP8 gradient of a kernel: the cotangent is its E4M3 codes and their scale.

    JAX cannot add codes. So one dot may use the slot, once.
    """

    data: Any  # the kernel's shape, `FP8_GRAD`
    # shape=(), or the kernel's rank with 1 in all axes but those of layers and groups, float32
    scale: jax.Array

    @classmethod
    def zeros(cls, like: jax.Array, blocks: tuple[int, ...] = ()) -> "GradSlot":
        """A slot with the shape of `like`, and with scales of shape `blocks`."""
        return cls(zero_fp8_grad(like), jnp.zeros(blocks, jnp.float32))

    def gradient(self) -> ScaledArray:
        """The gradient, of a slot that is a cotangent; zeros of an unused slot have the scale 1."""
        return ScaledArray(from_fp8_grad(self.data), jnp.where(self.scale == 0, 1.0, self.scale))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A kernel with a slot for its gradient, in another dtype than the kernel's.

    JAX's cotangent of a float16 array is float16, too coarse for a gradient. So `grad_slot` is an array of
    zeros with the kernel's shape, which `dot_general` never reads. Its cotangent is the gradient with respect
    to the kernel's value, in float32 or, of a `GradSlot`, as E4M3 codes and their scale.
    """

    value: Any  # ScaledArray or float array
    grad_slot: Any = None  # the kernel's shape, float32, or a `GradSlot`; None if `value` gets the gradient
    # Of a sharded kernel; `grad_slot` then has the shape of the shard.
    shard: KernelSharding | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, kernel: Any) -> "Weight":
        """The kernel, without a slot if it is no `Weight`."""
        return kernel if isinstance(kernel, cls) else cls(kernel)

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return (self.shard or WHOLE).whole_shape(self.value.shape)

    @property
    def ndim(self) -> int:
        """The kernel's rank."""
        return self.value.ndim

    def dequantize(self) -> jax.Array:
        """The value as an array, float32 if its gradient goes to `grad_slot`."""
        if self.grad_slot is None:
            return value(self.value)
        assert not isinstance(self.grad_slot, GradSlot)
        if self.shard:
            return _shard_value(self.shard, value(self.value).astype(jnp.float32), self.grad_slot)
        return lax.stop_gradient(value(self.value)).astype(jnp.float32) + self.grad_slot


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shard_value(shard: KernelSharding, kernel: jax.Array, grad_slot: jax.Array) -> jax.Array:
    """The all-gathered kernel; its gradient is reduce-scattered to `grad_slot`."""
    del grad_slot
    return shard.gathered(kernel)


_shard_value.defvjp(
    lambda shard, kernel, grad_slot: (
        _shard_value(shard, kernel, grad_slot),
        jnp.zeros_like(kernel, kernel.dtype),
    ),
    lambda shard, zeros, grad: (zeros, shard.scattered(grad, in_fp8=False)),
)
