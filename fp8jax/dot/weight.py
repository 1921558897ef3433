"""A kernel on its way through a loss."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.dot.placement import WHOLE, KernelPlacement
from fp8jax.scaled import value
from fp8jax.scaling.merge import FP8_GRAD


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("value", "grad_slot"), meta_fields=("shard",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A kernel on its way through a loss, with the place its gradient comes out of.

    A narrow kernel has no cotangent of its own worth having: that of a float16 array is
    float16. `grad_slot` is a zero array of the kernel's shape, never read by `dot_general`; its
    cotangent is the gradient with respect to the kernel's value, as float32 or as E4M3 codes
    whose scale leaves through the dot's state.
    """

    value: Any  # ScaledArray or float array
    grad_slot: Any  # shape=kernel's, float32 or merge.CODES
    shard: KernelPlacement | None = None  # over devices; then the slot is this device's part

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return (self.shard or WHOLE).whole_shape(self.value.shape)

    @property
    def ndim(self) -> int:
        """The kernel's rank."""
        return self.value.ndim

    def dequantize(self) -> jax.Array:
        """The value as a float32 array that gradients flow through."""
        assert self.grad_slot.dtype != FP8_GRAD
        if self.shard:
            return _shard_value(self.shard, value(self.value).astype(jnp.float32), self.grad_slot)
        return lax.stop_gradient(value(self.value)).astype(jnp.float32) + self.grad_slot


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shard_value(shard: KernelPlacement, kernel: jax.Array, grad_slot: jax.Array) -> jax.Array:
    """A kernel whole, whose gradient leaves through the slot as this device's part."""
    del grad_slot
    return shard.gathered(kernel)


_shard_value.defvjp(
    lambda shard, kernel, grad_slot: (
        _shard_value(shard, kernel, grad_slot),
        jnp.zeros_like(kernel, kernel.dtype),
    ),
    lambda shard, zeros, grad: (zeros, shard.scattered(grad, as_codes=False)),
)
