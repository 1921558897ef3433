"""The gradient of one parameter: the slot that the backward writes it to, its format and its scaling state.

The gradient of an FP8 dot's kernel is E4M3 codes and a scale. The codes are the cotangent of the kernel's
slot, the scale is the cotangent of the kernel's scaling state. `quantized` joins them in a `ScaledArray`.

A kernel with one FP8 dot and no other use gets its gradient as codes. The gradients of a kernel with other
uses (a second dot, weight decay in the loss) are summed in float32 and quantized afterwards.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.comm.wire import on_common_scales
from fp8jax.comm.zero import own_part
from fp8jax.quantization import ScaledArray, is_scaled, quantize_gradient
from fp8jax.rewrite import Uses
from fp8jax.scaling.merge import FP8_GRAD, from_fp8_grad, settled, zero_fp8_grad

# The key of the FP8 gradient's scale in a kernel's scaling state. Kernels without it have float gradients.
WGRAD_SCALE = "wgrad_scale"


def grad_slot(leaf: Any, shard: Any, state: Mapping[str, Any], uses: Uses | None) -> Any:
    """An array of zeros whose cotangent is the parameter's gradient; or the parameter itself.

    Args:
        leaf: the parameter, or this device's shard of it.
        shard: its `ShardSpec`, or None.
        state: its scaling state.
        uses: its uses in the loss, or None.

    Returns:
        `FP8_GRAD` or float32 zeros with the shape of the gradient; `leaf` for a plain parameter without an
        FP8 gradient.
    """
    is_fp8 = WGRAD_SCALE in state
    if not (is_fp8 or is_scaled(leaf) or shard is not None):
        return leaf
    like = leaf.data if is_scaled(leaf) else leaf
    if shard is not None and not shard.is_part:
        like = own_part(like, shard.axis, shard.axis_name)
    is_alone = uses is not None and uses.dots == 1 and not uses.others and not uses.is_shared
    return zero_fp8_grad(like) if is_fp8 and is_alone else jnp.zeros_like(like, jnp.float32)


def quantized(grads: Any, params: Any, state: Any, old: Any, shardings: Any) -> tuple[Any, Any]:
    """The gradients in their formats, and the scaling states with the gradients' scales.

    Args:
        grads: the slots' cotangents, a tree like the parameters; or float sums of microbatches.
        params: the parameters.
        state: the new scaling states.
        old: the scaling states of this step. A kernel without a gradient keeps its scale.
        shardings: the `GradSharding` of each parameter.

    Returns:
        FP8 gradients as `ScaledArray`s, other gradients of dots in their parameters' dtypes; and the states.
    """
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    rows = zip(flat, *map(treedef.flatten_up_to, (grads, shardings)), strict=True)
    new = []
    for (path, param), grad, sharding in rows:
        of_dot = state_at(state, path)
        if WGRAD_SCALE in of_dot:
            scale = settled(of_dot[WGRAD_SCALE], state_at(old, path)[WGRAD_SCALE])
            grad = _quantized(grad, param, scale, sharding.shard)
            state = with_state_at(state, path, {**of_dot, WGRAD_SCALE: grad.scale.reshape(scale.shape)})
        elif of_dot and not is_scaled(param):
            grad = grad.astype(param.dtype)
        new.append(grad)
    return treedef.unflatten(new), state


def _quantized(grad: Any, param: Any, scale: jax.Array, shard: Any) -> ScaledArray:
    """One gradient as a `ScaledArray`; `scale` is the scale of `FP8_GRAD` codes."""
    blocks = scale.shape + (1,) * (param.ndim - scale.ndim) if scale.ndim else ()
    blocks = param.scale.shape if is_scaled(param) else blocks
    if grad.dtype == FP8_GRAD:
        return ScaledArray(from_fp8_grad(grad), scale.reshape(blocks))
    if shard is None:
        return quantize_gradient(grad, blocks)
    return on_common_scales([grad], shard.axis_name, blocks)[0]


# The scaling state of a parameter ##################################################################


def state_at(states: Any, path: Any) -> Mapping[str, Any]:
    """The scaling state of the parameter at a JAX tree path; {} without a state."""
    found = states
    for name in _names(states, path):
        found = found[name]
    is_state = isinstance(found, Mapping) and not any(isinstance(x, Mapping) for x in found.values())
    return found if is_state else {}


def with_state_at(states: Any, path: Any, new: Mapping[str, Any]) -> Any:
    """The states with `new` in place of the state at `path`."""
    names = _names(states, path)
    if not names:
        return new
    return {**states, names[0]: with_state_at(states[names[0]], path[1:], new)}


def _names(states: Any, path: Any) -> list[Any]:
    """The keys of the parameter's state, without names of a box around the parameter, as for logical axes.
    Other tree keys than dict keys, such as list indices, are strings among the states."""
    keys = []
    for part in path:
        name = next((getattr(part, of) for of in ("key", "name", "idx") if hasattr(part, of)), part)
        name = name if isinstance(states, Mapping) and name in states else str(name)
        if not isinstance(states, Mapping) or name not in states:
            break
        keys.append(name)
        states = states[name]
    return keys
