"""The gradient of a loss, in the recipe's formats, and the new scaling state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core

from fp8jax import loss_scale
from fp8jax.comm import Zero
from fp8jax.comm.reduce import on_shared_scale
from fp8jax.gradients.devices import GradSharding, ShardContext, over_devices
from fp8jax.gradients.states import state_at, with_state_at
from fp8jax.gradients.traced import gradient
from fp8jax.scaled import ScaledArray, as_gradients, is_scaled, quantize_gradient
from fp8jax.scaling.merge import (
    FP8_GRAD,
    from_cotangents,
    from_fp8_grad,
    settled,
)
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params, sealed


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, zero: Zero | None = None
) -> Callable[..., Any]:
    """`jax.value_and_grad` for variables that hold scaled weights and scaling state.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` gives a scalar, or with `has_aux` a
            scalar and anything else.
        has_aux: as in `jax.value_and_grad`.
        zero: given, the batch is split over devices, see `fp8jax.comm.Zero`: each calls `loss_fn`,
            which is then a mean over the batch, with its part along the first axis of all positional
            arguments (keyword arguments it gets whole), inside `jax.shard_map`. The loss, gradients
            and scaling states are those of the whole batch; auxiliary outputs are stacked, one for
            each device.

    Returns:
        A function of the same arguments that gives `(loss, grads)`, or
        `((loss, aux), grads)`. `grads["params"]` holds an array for an array (in its dtype),
        and for a `ScaledArray` weight a float32 array, or a `ScaledArray` in E4M3 with a
        power-of-two scale where the recipe's weight gradients are FP8. Where a layer is
        used more than once, its amaxes are merged by max; the state of a layer that the
        loss did not use stays as it was. Other collections take no part.

    Raises:
        ValueError: with `zero`, a batch array does not divide by the number of devices.
        TypeError: `loss_fn` is no function, or `zero` no `Zero`.

    References:
        FP8-LM, arXiv 2310.18313, section 2.1 (FP8 gradients); MS-AMP `ScalingParameter`.
    """
    check_arguments(loss_fn, zero)
    make = functools.partial(on_one_device, loss_fn, has_aux)
    return for_optimizers(loss_fn, make(None) if zero is None else over_devices(make, zero, has_aux))


def for_optimizers(loss_fn: Callable[..., Any], grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the whole batch's loss as optimizers are to get it: with the next scaling states in the
    place of merged ones, as `ScaledGradient`s, those of whole variables as `Gradients`."""

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        out, grads = grad_fn(variables, *args, **kwargs)
        if not has_params(grads):
            return out, as_gradients(grads)
        if SCALING in grads:
            grads = {**grads, SCALING: _jitted_settled(grads[SCALING], variables[SCALING])}
        return out, sealed({**grads, PARAMS: as_gradients(grads[PARAMS])})

    return wrapped


def check_arguments(loss_fn: Any, zero: Any) -> None:
    """Raises TypeError for what is no function, or no `Zero`."""
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn`: expected a function; got {type(loss_fn).__name__}.")
    if not isinstance(zero, Zero | None):
        raise TypeError(f"`zero`: expected a fp8jax.comm.Zero or None; got {zero!r}.")


def on_one_device(
    loss_fn: Callable[..., Any], has_aux: bool, local: ShardContext | None
) -> Callable[..., Any]:
    """`value_and_grad` on one device; with `local`, of its parts of the variables, one of many.

    The loss is then divided by the number of devices. Gradients that dot products sum over devices are whole;
    `ShardContext` sums the others. Scaling states can still be merged with those of other parts of the batch;
    then they are settled.
    """

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        if has_params(variables) and LOSS_SCALE in variables:
            return _with_loss_scale(loss_fn, has_aux, local, variables, args, kwargs)

        def run(variables: Any) -> Any:
            return _value_and_grad(loss_fn, has_aux, local, variables, args, kwargs)

        # JAX adds arrays of an extended dtype only in compiled code.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variables))
        return run(variables) if is_traced else jax.jit(run)(variables)

    return wrapped


_jitted_settled = jax.jit(settled)


def _value_and_grad(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    local: ShardContext | None,
    variables: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    is_flax = has_params(variables)
    params, old = (variables[PARAMS], variables.get(SCALING, {})) if is_flax else (variables, {})
    if local is None:
        shardings, divisor = jax.tree.map(lambda leaf: GradSharding(), params, is_leaf=is_scaled), 1
    else:
        params, shardings, divisor = local.whole(params), local.shardings, local.zero.devices
    inside = {**variables, PARAMS: params} if is_flax else params
    found = gradient(loss_fn, has_aux, inside, args, kwargs, shardings, divisor)
    if not is_flax:
        return found.out, found.grads
    grads, state = narrowed(found.grads, params, from_cotangents(found.state), old, shardings)
    return found.out, {PARAMS: grads, **({SCALING: state} if SCALING in variables else {})}


def _with_loss_scale(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    local: ShardContext | None,
    variables: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """`value_and_grad` of the scaled loss, made that of the loss."""
    state = variables[LOSS_SCALE]

    def scaled(variables: Any, *args: Any, **kwargs: Any) -> Any:
        out = loss_fn(variables, *args, **kwargs)
        return (out[0] if has_aux else out) * state["scale"], out

    variables = {name: tree for name, tree in variables.items() if name != LOSS_SCALE}
    (_, out), grads = on_one_device(scaled, True, local)(variables, *args, **kwargs)
    if local is not None:
        loss, *aux = out if has_aux else (out,)
        out = (loss / local.zero.devices, *aux) if has_aux else loss / local.zero.devices
    grads[PARAMS], new_state = loss_scale.unscale(grads[PARAMS], state)
    return out, {**grads, LOSS_SCALE: new_state}


def narrowed(grads: Any, params: Any, state: Any, old: Any, shardings: Any) -> tuple[Any, Any]:
    """The marked gradients as `ScaledArray`s, the others of products in their parameters' dtypes, and the
    state with their scales, which are the `old` state's where there is no gradient."""
    flat, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    rows = zip(flat, *map(treedef.flatten_up_to, (grads, shardings)), strict=True)
    new = []
    for (path, param), grad, sharding in rows:
        kept = state_at(state, path)
        if "wgrad_scale" in kept:
            scale = settled(kept["wgrad_scale"], state_at(old, path)["wgrad_scale"])
            grad, scale = _narrow_leaf(grad, param, scale, sharding)
            state = with_state_at(state, path, {**kept, "wgrad_scale": scale})
        elif kept and not is_scaled(param):
            grad = grad.astype(param.dtype)
        new.append(grad)
    return treedef.unflatten(new), state


def _narrow_leaf(
    grad: Any, param: Any, scale: jax.Array, sharding: GradSharding
) -> tuple[ScaledArray, jax.Array]:
    """One gradient, as codes on `scale`, wide or done, as a `ScaledArray`; and its scale in scale's shape."""
    blocks = scale.shape + (1,) * (param.ndim - scale.ndim) if scale.ndim else ()
    if is_scaled(param):
        blocks = param.scale.shape
    if is_scaled(grad):
        return grad, grad.scale.reshape(scale.shape)
    if grad.dtype == FP8_GRAD:
        return ScaledArray(from_fp8_grad(grad), scale.reshape(blocks)), scale
    if sharding.shard is not None:
        q = on_shared_scale(grad, blocks, sharding.shard.axis_name)
    else:
        q = quantize_gradient(grad, blocks)
    return q, q.scale.reshape(scale.shape)
