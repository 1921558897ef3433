"""Gradient accumulation: `optax.MultiSteps` for quantized gradients and whole variables."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp8jax.optim.links import unless_skipped
from fp8jax.quantization import is_scaled, value
from fp8jax.scaling.merge import marked, unmarked
from fp8jax.variables import PARAMS, SCALING, Updates, check_gradients, has_params, with_collections


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
