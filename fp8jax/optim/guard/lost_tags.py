"""Gradients that lost their tag: an error, or in compiled code a loss that is not a number.

An optimizer that gets such a gradient (see `quantization.gradient`) must not take the step, and must not be
silent. Where values are at hand it raises. Compiled code cannot raise. There all weights and moments stay as
they were, but the scale of each quantized weight is `spoilt`. So the next loss is NaN, and `restore_weights`
gives the weights back to the bit.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.optim.guard.replace_update import ReplaceUpdate, is_spoilt, refuse_replaced, restored, spoilt
from fp8jax.platforms import any_of, is_at_hand
from fp8jax.quantization import ScaledArray, ScaledGradient, amax, is_scaled
from fp8jax.variables import PARAMS, has_params, with_collections

_REMEDY = (
    "A sum, factor, clip or mean leaf by leaf changes codes and scales apart. Do it by "
    "fp8jax.gradients.tree_map; over microbatches by fp8jax.accumulate_gradients, over devices by "
    "fp8jax.comm.all_reduce, by the norm with fp8jax.optim.clip_by_global_norm."
)


def check_tags(grads: Any) -> list[Any]:
    """Whether each gradient lost its tag: bools of shape (), None for leaves without one.

    Raises:
        TypeError: a gradient lost its tag, outside of compiled code. A gradient of zeros needs none. Or these
            are the updates of an optimizer.
    """
    refuse_replaced(grads)
    broken: list[Any] = []
    leaves, _ = jax.tree.flatten_with_path(grads, is_leaf=is_scaled)
    for path, leaf in leaves:
        if not isinstance(leaf, ScaledGradient):
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
                "earlier step changed an FP8 gradient, or an update after the optimizer. The weights are not "
                f"lost: `fp8jax.optim.restore_weights(variables)` gives them back. {_REMEDY} Put "
                "transformations before `adam` and `adamw`."
            )


def _is_changed(grad: ScaledGradient) -> bool:
    with jax.ensure_compile_time_eval():
        return not jnp.all(grad.is_intact) and bool(jnp.any(grad.data != 0))


def _has_spoilt(bits: jax.Array) -> bool:
    with jax.ensure_compile_time_eval():
        return bool(jnp.any(is_spoilt(bits)))


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
    is_lost = any_of(flags)

    def chosen(leaf: Any, update: Any, flag: Any) -> Any:
        if not is_scaled(leaf):
            return jnp.where(is_lost, 0 if flag is None else jnp.nan, update)
        bad = ScaledArray.tree_unflatten(None, (leaf.data, spoilt(leaf.bits)))
        return jax.tree.map(lambda x, y: jnp.where(is_lost, x, y), ReplaceUpdate.by(bad), update)

    rows = zip(leaves, treedef.flatten_up_to(updates), broken, strict=True)
    return treedef.unflatten(chosen(*row) for row in rows)


def restore_weights(variables: Any) -> Any:
    """The variables, or parameters, with finite scales, after a step of changed FP8 gradients or updates.

    In compiled code such a step changes no quantized weight, but makes its scales NaN, so that the next loss
    is NaN. This gives the scales back to the bit. After a changed update moments, master weights and plain
    parameters have taken the step. The cause is arithmetic on the leaves of FP8 gradients, for which there is
    `fp8jax.gradients.tree_map`, or a transformation behind `adam` or `adamw`.
    """
    if has_params(variables):
        return with_collections(variables, {PARAMS: restore_weights(variables[PARAMS])})

    def whole(leaf: Any) -> Any:
        if not is_scaled(leaf) or is_scaled(leaf.bits):
            return leaf
        return ScaledArray.tree_unflatten(None, (leaf.data, restored(leaf.bits)))

    return jax.tree.map(whole, variables, is_leaf=is_scaled)
