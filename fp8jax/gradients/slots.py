"""The gradient of one parameter: its slot in the backward, and its format.

The gradient of an FP8 dot's kernel is E4M3 codes and a scale. With one FP8 dot and no other use of the
kernel, both are the cotangent of a `GradSlot`. The gradients of a kernel with other uses (a second dot, or
weight decay in the loss) are summed in float32 and quantized afterwards.
"""

import math
from typing import Any

import jax.numpy as jnp

from fp8jax.comm.buckets import on_common_scales
from fp8jax.comm.zero import own_part
from fp8jax.dot import GradSlot
from fp8jax.quantization import ScaledArray, is_scaled, quantize_gradient
from fp8jax.rewrite import Uses


def grad_slot(leaf: Any, shard: Any, uses: Uses | None) -> Any:
    """Zeros, or a `GradSlot`, with the parameter's gradient as cotangent; or the parameter itself.

    Args:
        leaf: the parameter, or this device's shard of it.
        shard: its `ShardSpec`, or None.
        uses: its uses in the loss, or None.

    Returns:
        A slot with the shape of the gradient; `leaf` for a plain parameter without an FP8 gradient.
    """
    blocks = _blocks(leaf, uses)
    if blocks is None and not is_scaled(leaf) and shard is None:
        return leaf
    like = leaf.data if is_scaled(leaf) else leaf
    if shard is not None and not shard.is_part:
        like = own_part(like, shard.axis, shard.axis_name)
    if blocks is not None and _is_alone(uses, blocks):
        return GradSlot.zeros(like, blocks)
    return jnp.zeros_like(like, jnp.float32)


def _blocks(leaf: Any, uses: Uses | None) -> tuple[int, ...] | None:
    """The shape of the scales of a parameter's FP8 gradient; None for a float gradient."""
    kernel = None if uses is None else uses.kernel
    if kernel is None or kernel.recipe.weight_grad != "E4M3":
        return None
    if is_scaled(leaf):
        return leaf.scale.shape
    return kernel.blocks(leaf) if kernel.layers or kernel.groups else ()


def _is_alone(uses: Any, blocks: tuple[int, ...]) -> bool:
    """Whether one dot computes the whole gradient, with all of its scales."""
    scales = math.prod(uses.kernel.layers) * max(uses.kernel.groups, 1)
    return uses.dots == 1 and not uses.others and not uses.is_shared and math.prod(blocks) == scales


def in_format(grad: Any, param: Any, shard: Any, uses: Uses | None) -> Any:
    """The gradient in its format, from the cotangent of `grad_slot`; the arguments are those of `grad_slot`.

    Returns:
        FP8 gradients as `ScaledArray`s, other gradients of plain parameters in the parameter's dtype.
    """
    if isinstance(grad, GradSlot):
        return grad.gradient()
    blocks = _blocks(param, uses)
    if blocks is None:
        return grad if is_scaled(param) else grad.astype(param.dtype)
    return in_blocks(grad, blocks, shard)


def in_blocks(grad: Any, blocks: tuple[int, ...], shard: Any) -> ScaledArray:
    """A float gradient as E4M3, with scales of shape `blocks` that devices with shards have in common."""
    if shard is None:
        return quantize_gradient(grad, blocks)
    return on_common_scales([grad], shard.axis_name, blocks)[0]
