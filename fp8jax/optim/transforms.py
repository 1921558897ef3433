"""Gradient transformations between `value_and_grad` and optax: clipping, dequantization, accumulation.

A gradient leaf is an array or an FP8 `ScaledArray`. optax's transformations raise on a `ScaledArray`, because
JAX has no implicit promotion for float8. They work after `dequantize`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.optim.checks import check_number
from fp8jax.optim.guard.lost_tags import check_tags, spoilt_updates
from fp8jax.optim.guard.replace_update import refuse_replaced
from fp8jax.platforms import is_at_hand
from fp8jax.quantization import ScaledArray, ScaledGradient, is_scaled, refuse_dicts, value
from fp8jax.variables import OF_FLAX, OURS, PARAMS, SCALING, has_params, params_of


def takes_variables(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` for parameters or whole variables: it gets the "params" collection of a tree that has one.

    Raises:
        TypeError: from `init` and `update`, masks or labels took codes or scales out of scaled arrays.
        ValueError: from `update`, the scaling state did not move, or there are gradients beside "params".
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        _refuse_cut(params)
        return tx.init(params_of(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _refuse_cut((updates, params))
        if has_params(params):
            _check_moved(params.get(SCALING, {}), state)
        if not has_params(updates):
            return tx.update(updates, state, params_of(params), **extra)
        if SCALING in updates:
            raise ValueError(
                f"`updates`: expected gradients of the parameters; got also {SCALING!r}, which "
                "is no gradient. `fp8jax.value_and_grad` returns both apart, as in `loss, grads, variables`; "
                f"of gradients by JAX's own, give ['params'], and take [{SCALING!r}] as the new state."
            )
        _refuse_other_gradients(updates)
        new, state = update(updates[PARAMS], state, params, **extra)
        return {PARAMS: new}, state

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_other_gradients(grads: Any) -> None:
    """Raises ValueError for gradients beside the collection "params", which would be dropped."""
    known = (*OURS, *OF_FLAX)
    if others := [name for name in grads if name not in known and jax.tree.leaves(grads[name])]:
        raise ValueError(
            f"`updates`: expected gradients in {PARAMS!r} alone; got also {', '.join(map(repr, others))}: "
            f"collections beside {PARAMS!r}, which no optimizer trains. Put all that is trained into "
            f"{PARAMS!r}, as in {{{PARAMS!r}: {{'model': ..., {others[0]!r}: ...}}}}; else give ['params']."
        )


def _refuse_cut(tree: Any) -> None:
    """Raises TypeError if a mask or labels of optax took codes or scales out of `ScaledArray`s."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_scaled):
        if is_scaled(leaf) and optax.MaskedNode in map(type, (leaf.data, leaf.bits)):
            raise TypeError(
                "`params`: expected whole scaled arrays; got one without its codes or its scale: the mask or "
                "the labels have a leaf for each of the two. Make them by jax.tree_util.tree_map_with_path("
                "..., is_leaf=fp8jax.quantization.is_scaled), or give one label for a layer."
            )


def _check_moved(scaling: Any, state: Any) -> None:
    """Raises ValueError, outside of compiled code, if many steps left the scaling state as `init` made it."""
    histories, _ = jax.tree.flatten_with_path(scaling)
    histories = [leaf for path, leaf in histories if getattr(path[-1], "key", None) == "amax_history"]
    steps: Any = getattr(getattr(state, "adam", None), "count", None)
    if not histories or not all(map(is_at_hand, [steps, *histories])):
        return
    with jax.ensure_compile_time_eval():
        is_first = steps > 1 and not any(jnp.any(history) for history in histories)
    if is_first:
        raise ValueError(
            f"`params`: expected the scaling state of {int(steps)} steps; got `init`'s. Pass on the "
            "variables that `value_and_grad` returns, as in `loss, grads, variables = grad_fn(variables)`."
        )


def dequantize() -> optax.GradientTransformationExtraArgs:
    """Dequantizes FP8 gradients to float32, so that optax's transformations of gradients can follow.

    Those that read the parameters, as `optax.adaptive_grad_clip`, need `with_dequantized` around them.

    Raises:
        TypeError: arithmetic changed an FP8 gradient's codes and scales apart. Compiled code cannot raise:
            there the gradient is NaN.
    """

    def update(updates: Any, params: Any = None) -> Any:
        del params
        check_tags(updates)
        return jax.tree.map(value, updates, is_leaf=is_scaled)

    return takes_variables(optax.stateless(update))


def global_norm(tree: Any) -> jax.Array:
    """The norm of all gradients or parameters in a tree, as `optax.global_norm`; float32, shape ().

    Quantized leaves count with their values.

    Raises:
        TypeError: the tree has an optimizer's updates of quantized parameters, which are their new values.
        ValueError: the tree has arrays beside "params" in collections that are neither Flax's nor fp8jax's.
    """
    refuse_dicts(tree)
    refuse_replaced(tree)
    if has_params(tree):
        _refuse_other_gradients(tree)
    leaves = jax.tree.leaves(params_of(tree), is_leaf=is_scaled)
    squares = [jnp.sum(jnp.square(jnp.abs(value(leaf)).astype(jnp.float32))) for leaf in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


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
        norm = global_norm(updates)
        is_small = (norm < max_norm) | (norm == 0)  # zeros stay with max_norm=0, too
        factor = jnp.where(is_small, 1.0, max_norm / norm).astype(jnp.float32)

        def clip(leaf: Any) -> Any:
            if isinstance(leaf, ScaledGradient):
                return leaf.times(factor)
            if is_scaled(leaf):
                return ScaledArray(leaf.data, leaf.scale * factor)
            # Not in 16 bits, which round the factor.
            wide = leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf
            return (wide * factor.astype(wide.dtype)).astype(leaf.dtype)

        return jax.tree.map(clip, updates, is_leaf=is_scaled)

    return takes_variables(optax.stateless(update))


def multi_steps(tx: optax.GradientTransformation, every_k: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.MultiSteps(tx, every_k)` that dequantizes gradients and averages them in float32.

    FP8 codes cannot be averaged, and `optax.MultiSteps` raises on FP8 gradients. Parameters and the state of
    `tx` keep their formats. With float gradients, as the recipe "te" has, `optax.MultiSteps` does the same,
    but for a microbatch with NaN or infinity: here `tx` skips one step, and optax's sums stay NaN for ever.

    Args:
        tx: the optimizer, e.g. an `optax.chain` that ends in `fp8jax.optim.adamw`.
        every_k: gradients per step, a number or a schedule.

    Returns:
        An optimizer for parameters or whole variables. Its updates are zero between steps of `tx`.
    """
    tx = optax.with_extra_args_support(tx)

    def multi(init: Any) -> optax.MultiSteps:
        return optax.MultiSteps(optax.GradientTransformationExtraArgs(init, tx.update), every_k)

    def init(params: Any) -> optax.MultiStepsState:
        values = jax.tree.map(value, params, is_leaf=is_scaled)
        return multi(lambda _: tx.init(params)).init(values)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        broken = check_tags(updates)
        grads = jax.tree.map(value, updates, is_leaf=is_scaled)
        new, state = multi(tx.init).update(grads, state, params, **extra)
        # optax multiplies the sum of a finished step by zero, which keeps NaN and infinity for ever.
        acc_grads = jax.tree.map(lambda x: jnp.where(state.mini_step == 0, 0, x), state.acc_grads)
        return spoilt_updates(new, params, broken, grads), state._replace(acc_grads=acc_grads)

    return takes_variables(optax.GradientTransformationExtraArgs(init, update))


def plain_mask(mask: Any | Callable[[Any], Any] | None) -> Any:
    """The mask; a function is wrapped so that it sees each `ScaledArray` as one leaf of the value's shape."""
    if not callable(mask):
        return mask

    def as_value(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32) if is_scaled(leaf) else leaf

    return lambda params: mask(jax.tree.map(as_value, params, is_leaf=is_scaled))
