"""`value_and_grad`: gradients in the recipe's formats, and the new scaling state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core

from fp8jax import loss_scale
from fp8jax.comm import Zero
from fp8jax.gradients.devices import GradSharding, ShardContext, over_devices
from fp8jax.gradients.slots import quantized
from fp8jax.gradients.traced import gradient
from fp8jax.quantization import as_gradients, is_scaled
from fp8jax.scaling.merge import from_cotangents, settled
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params, sealed


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, zero: Zero | None = None
) -> Callable[..., Any]:
    """`jax.value_and_grad` for variables with quantized weights and scaling state.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` returns a scalar, or with `has_aux` a pair of a scalar
            and auxiliary outputs.
        has_aux: as in `jax.value_and_grad`.
        zero: shards the batch over devices, see `fp8jax.comm.Zero`. Each device calls `loss_fn` inside
            `jax.shard_map` with its part of all positional arguments along their first axis; keyword
            arguments are replicated. `loss_fn` must be a mean over the batch. The loss, gradients and scaling
            states are those of the whole batch; auxiliary outputs are stacked over the devices.

    Returns:
        A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.
        `grads["params"]` has an array of the same dtype for each array. For a `ScaledArray` weight it has an
        E4M3 `ScaledArray` with a power-of-two scale if the recipe's weight gradients are FP8, otherwise a
        float32 array. If a layer is used more than once, its amaxes are merged by max; the state of an unused
        layer does not change. Other collections are not differentiated.

    Raises:
        ValueError: with `zero`, a batch array's first axis is not divisible by the number of devices.
        TypeError: `loss_fn` is not a function, or `zero` is not a `Zero`.

    References:
        FP8-LM, arXiv 2310.18313, section 2.1 (FP8 gradients); MS-AMP `ScalingParameter`.
    """
    check_arguments(loss_fn, zero)
    make = functools.partial(on_one_device, loss_fn, has_aux)
    return for_optimizers(loss_fn, make(None) if zero is None else over_devices(make, zero, has_aux))


def for_optimizers(loss_fn: Callable[..., Any], grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `grad_fn` so that it returns an optimizer's inputs: `settled` scaling states, `ScaledGradient`s,
    and for whole variables `Gradients`."""

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
    """Raises TypeError if `loss_fn` is not callable or `zero` is not a `Zero`."""
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn`: expected a function; got {type(loss_fn).__name__}.")
    if not isinstance(zero, Zero | None):
        raise TypeError(f"`zero`: expected a fp8jax.comm.Zero or None; got {zero!r}.")


def on_one_device(
    loss_fn: Callable[..., Any], has_aux: bool, local: ShardContext | None
) -> Callable[..., Any]:
    """`value_and_grad` on one device; with `local`, on one of many, with its shards of the variables.

    With `local` the loss is divided by the number of devices. Dots reduce some gradients over the devices;
    `ShardContext` reduces the others. The scaling states are not yet `settled`, so that they can be merged
    with those of other microbatches and devices.
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
    grads, state = quantized(found.grads, params, from_cotangents(found.state), old, shardings)
    return found.out, {PARAMS: grads, **({SCALING: state} if SCALING in variables else {})}


def _with_loss_scale(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    local: ShardContext | None,
    variables: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """`value_and_grad` with loss scaling: the gradients of the scaled loss, unscaled."""
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
