"""Gradients that lost their tag: an error, or in compiled code a loss that is not a number.

An optimizer that gets such a gradient (see `quantization.gradient`) must not take the step, and must not be
silent. Where values are at hand it raises. Compiled code cannot raise. There all weights and moments stay as
they were, but the scale of each quantized weight becomes a NaN that holds the scale's exponent:

    sign, mantissa = the 8 bits of (exponent + 1)          # both for float32 and for bfloat16 scales

So the next loss is NaN, and `restore_weights` gives the weights back to the bit.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from fp8jax.optim.replace_update import ReplaceUpdate, replaces
from fp8jax.quantization import ScaledArray, ScaledGradient, amax, is_scaled
from fp8jax.variables import PARAMS, has_params

_REMEDY = (
    "A sum, factor, clip or mean leaf by leaf changes codes and scales apart. Do it by "
    "fp8jax.gradients.tree_map; over microbatches by fp8jax.accumulate_gradients, over devices by "
    "fp8jax.comm.all_reduce, by the norm with fp8jax.optim.clip_by_global_norm."
)


def check_tags(grads: Any) -> list[Any]:
    """Whether each gradient lost its tag: bools of shape (), None for leaves without one.

    Raises:
        TypeError: a gradient lost its tag, outside of compiled code. A gradient of zeros needs none.
    """
    broken: list[Any] = []
    leaves, _ = jax.tree.flatten_with_path(grads, is_leaf=is_scaled)
    for path, leaf in leaves:
        if not isinstance(leaf, ScaledGradient) or replaces(leaf):
            broken.append(None)
            continue
        broken.append(~jnp.all(leaf.is_intact))
        if is_at_hand(leaf.bits) and _is_changed(leaf):
            raise TypeError(
                f"`updates`: expected an FP8 gradient as `value_and_grad` returned it at "
                f"{jax.tree_util.keystr(path)}; got one that arithmetic changed. {_REMEDY}"
            )
    return broken


def check_finite_scales(params: Any) -> None:
    """Raises ValueError, outside of compiled code, if weights are `spoilt`."""
    leaves, _ = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    for path, leaf in leaves:
        if is_scaled(leaf) and is_at_hand(leaf.bits) and _has_spoilt(leaf.bits):
            raise ValueError(
                f"`params`: expected finite scales; got NaN at {jax.tree_util.keystr(path)}, because an "
                "earlier step got an FP8 gradient that arithmetic changed. The weights are not lost: "
                f"`fp8jax.optim.restore_weights(variables)` gives them back. {_REMEDY}"
            )


def _is_changed(grad: ScaledGradient) -> bool:
    with jax.ensure_compile_time_eval():
        return not jnp.all(grad.is_intact) and bool(jnp.any(grad.data != 0))


def _has_spoilt(bits: jax.Array) -> bool:
    with jax.ensure_compile_time_eval():
        return bool(jnp.any(_is_spoilt(bits)))


def is_at_hand(x: Any) -> bool:
    """Whether the values of an array can be read: not in compiled code, nor on other processes."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and not x.is_deleted() and x.is_fully_addressable


def spoilt(bits: jax.Array) -> jax.Array:
    """The bits of scales, uint32 or uint16, as NaNs that hold their exponents."""
    shift = 8 * bits.dtype.itemsize - 16
    top = (bits >> shift).astype(jnp.uint32)
    held = (top >> 7) + 1
    nan = (((held & 1) << 15) | 0x7F80 | (held >> 1)).astype(bits.dtype) << shift
    return jnp.where(_is_spoilt(bits), bits, nan)


def _is_spoilt(bits: jax.Array) -> jax.Array:
    """Whether these are bits of NaN."""
    top = bits >> (8 * bits.dtype.itemsize - 16)
    return ((top & 0x7F80) == 0x7F80) & ((top & 0x7F) != 0)


def _restored(bits: jax.Array) -> jax.Array:
    shift = 8 * bits.dtype.itemsize - 16
    top = (bits >> shift).astype(jnp.uint32)
    exponent = (((top & 0x7F) << 1) | (top >> 15)) - 1
    return jnp.where(_is_spoilt(bits), (exponent << 7).astype(bits.dtype) << shift, bits)


def spoilt_scale(scale: jax.Array) -> jax.Array:
    """A float32 scale, `spoilt`."""
    return lax.bitcast_convert_type(spoilt(lax.bitcast_convert_type(scale, jnp.uint32)), jnp.float32)


def spoilt_updates(updates: Any, params: Any, broken: list[Any], grads: Any) -> Any:
    """The updates; if a gradient was `broken`, those that leave the weights and spoil their scales.

    Args:
        updates: an optimizer's updates, a tree like the parameters.
        params: the parameters.
        broken: see `check_tags`.
        grads: the gradients as float arrays.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    flags = [
        flag & ~(amax(grad) < jnp.inf)
        for flag, grad in zip(broken, treedef.flatten_up_to(grads), strict=True)
        if flag is not None
    ]
    if not flags:
        return updates
    is_lost = jnp.any(jnp.stack(flags))

    def chosen(leaf: Any, update: Any, flag: Any) -> Any:
        if not is_scaled(leaf):
            return jnp.where(is_lost, 0 if flag is None else jnp.nan, update)
        bad = ScaledArray.tree_unflatten(None, (leaf.data, spoilt(leaf.bits)))
        return jax.tree.map(lambda x, y: jnp.where(is_lost, x, y), ReplaceUpdate.by(bad), update)

    rows = zip(leaves, treedef.flatten_up_to(updates), broken, strict=True)
    return treedef.unflatten(chosen(*row) for row in rows)


def restore_weights(variables: Any) -> Any:
    """The variables, or parameters, with finite scales again after a step that got a changed FP8 gradient.

    In compiled code such a step changes no weight, but makes the scales of quantized weights NaN, so that the
    next loss is NaN. This gives the scales back to the bit. The cause is arithmetic on the leaves of FP8
    gradients; do it with `fp8jax.gradients.tree_map`.
    """
    if has_params(variables):
        return {**variables, PARAMS: restore_weights(variables[PARAMS])}

    def restored(leaf: Any) -> Any:
        if not is_scaled(leaf) or is_scaled(leaf.bits):
            return leaf
        return ScaledArray.tree_unflatten(None, (leaf.data, _restored(leaf.bits)))

    return jax.tree.map(restored, variables, is_leaf=is_scaled)
