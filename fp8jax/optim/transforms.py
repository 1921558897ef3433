"""Gradient transformations between `value_and_grad` and optax: clipping, dequantization, accumulation.

A gradient leaf is an array or an FP8 `ScaledArray`. optax's transformations raise on a `ScaledArray`, because
JAX has no implicit promotion for float8. They work after `dequantize`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp8jax.optim.checks import check_number
from fp8jax.optim.state import skipped
from fp8jax.quantization import ScaledArray, is_scaled, like_gradient, value
from fp8jax.scaling.merge import marked, unmarked
from fp8jax.variables import PARAMS, SCALING, Updates, check_gradients, has_params, with_collections


def on_params(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` on the "params" collection of whole variables; other collections pass through.

    A tree without a "params" collection goes to `tx` unchanged. If `tx` skips a step and `update` gets the
    variables, the scaling state stays the old one.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return tx.init(params[PARAMS] if has_params(params) else params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        check_gradients(updates, params)
        if not has_params(updates):
            params = params[PARAMS] if has_params(params) else params
            return tx.update(updates, state, params, **extra)
        variables = params if has_params(params) else {PARAMS: params}
        new, new_state = tx.update(updates[PARAMS], state, variables[PARAMS], **extra)
        new = {PARAMS: new}
        if SCALING in updates and SCALING in variables:
            new[SCALING] = unless_skipped(updates[SCALING], variables[SCALING], new_state, state)
        return with_collections(updates, new, Updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def unless_skipped(new: Any, old: Any, new_state: Any, old_state: Any) -> Any:
    """The new tree, or the old one after a step that the optimizer skipped."""
    is_taken = skipped(new_state) == skipped(old_state)
    return jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), new, old)


def dequantize() -> optax.GradientTransformationExtraArgs:
    """Dequantizes FP8 gradients to float32, so that any optax transformation can follow."""

    def update(updates: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(value, updates, is_leaf=is_scaled)

    return on_params(optax.stateless(update))


def clip_by_global_norm(max_norm: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` for quantized gradients.

    Clipping multiplies the scales and leaves the codes. The norm is computed in float32 from the dequantized
    gradients.

    Raises:
        ValueError: `max_norm` is negative or NaN.

    References:
        MS-AMP `clip_grad_norm_`.
    """
    check_number("max_norm", max_norm, or_inf=True)

    def update(updates: Any, params: Any = None) -> Any:
        del params
        leaves = jax.tree.leaves(updates, is_leaf=is_scaled)
        squares = [jnp.sum(jnp.square(value(leaf).astype(jnp.float32))) for leaf in leaves]
        norm = jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm).astype(jnp.float32)

        def clip(leaf: Any) -> Any:
            if is_scaled(leaf):
                return like_gradient(leaf, ScaledArray(leaf.data, leaf.scale * factor))
            return leaf * factor.astype(leaf.dtype)

        return jax.tree.map(clip, updates, is_leaf=is_scaled)

    return on_params(optax.stateless(update))


class MultiStepsState(NamedTuple):
    """State of `multi_steps`."""

    inner: optax.MultiStepsState  # its accumulated gradients are float32
    scaling: Any  # max of the `marked` scaling states since the last step; -inf before the first


def multi_steps(tx: optax.GradientTransformation, every_k: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.MultiSteps(tx, every_k)` that dequantizes gradients and averages them in float32.

    FP8 codes cannot be averaged, and `optax.MultiSteps` raises on FP8 gradients. Parameters and the state of
    `tx` keep their formats. The scaling state changes once per step of `tx`: between steps the amaxes are
    merged by max.

    Args:
        tx: the optimizer, e.g. an `optax.chain` that ends in `fp8jax.optim.adamw`.
        every_k: gradients per step, a number or a schedule.

    Returns:
        An optimizer for parameters or whole variables. Its updates are zero between steps of `tx`.
    """
    tx = optax.with_extra_args_support(tx)

    def multi(init: Any) -> optax.MultiSteps:
        return optax.MultiSteps(optax.GradientTransformationExtraArgs(init, tx.update), every_k)

    def init(params: Any) -> MultiStepsState:
        scaling = params.get(SCALING, {}) if has_params(params) else {}
        unseen = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), scaling)
        params = params[PARAMS] if has_params(params) else params
        values = jax.tree.map(value, params, is_leaf=is_scaled)
        return MultiStepsState(multi(lambda _: tx.init(params)).init(values), unseen)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        check_gradients(updates, params)
        variables, is_flax = params, has_params(updates)
        params = variables[PARAMS] if has_params(variables) else variables
        grads = jax.tree.map(value, updates[PARAMS] if is_flax else updates, is_leaf=is_scaled)
        steps = multi(tx.init)
        new, inner = steps.update(grads, state.inner, params, **extra)
        if not is_flax:
            return new, state._replace(inner=inner)
        if SCALING not in updates:
            return with_collections(updates, {PARAMS: new}, Updates), state._replace(inner=inner)
        if not has_params(variables):
            raise ValueError("`params`: expected whole variables, as `updates` are; got parameters alone.")
        is_step = steps.has_updated(inner)
        merged = jax.tree.map(jnp.maximum, state.scaling, marked(updates[SCALING]))
        kept = jax.tree.map(
            lambda new, old: jnp.where(is_step, new, old), unmarked(merged), variables[SCALING]
        )
        kept = unless_skipped(kept, variables[SCALING], inner, state.inner)
        unseen = jax.tree.map(lambda x: jnp.where(is_step, -jnp.inf, x), merged)
        return with_collections(updates, {PARAMS: new, SCALING: kept}, Updates), MultiStepsState(
            inner, unseen
        )

    return optax.GradientTransformationExtraArgs(init, update)


def plain_mask(mask: Any | Callable[[Any], Any] | None) -> Any:
    """The mask; a function is wrapped so that it sees each `ScaledArray` as one leaf of the value's shape."""
    if not callable(mask):
        return mask

    def as_value(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32) if is_scaled(leaf) else leaf

    return lambda params: mask(jax.tree.map(as_value, params, is_leaf=is_scaled))
