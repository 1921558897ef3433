"""`value_and_grad`: gradients in the recipe's formats, and the new scaling state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from fp8jax import loss_scale
from fp8jax.comm import Zero
from fp8jax.gradients.devices import GradFn, ShardContext, over_devices
from fp8jax.gradients.keys import shown
from fp8jax.gradients.slots import quantized
from fp8jax.gradients.traced import gradient
from fp8jax.quantization import as_gradients
from fp8jax.scaling.block import for_part, of_whole
from fp8jax.scaling.merge import from_cotangents, settled
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, Gradients, has_params


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
        TypeError: `loss_fn` is not a function or does not return a loss, or `zero` is not a `Zero`.

    References:
        FP8-LM, arXiv 2310.18313, section 2.1 (FP8 gradients); MS-AMP `ScalingParameter`.
    """
    check_arguments(loss_fn, zero)
    return for_optimizers(loss_fn, has_aux, over_devices(on_one_device, zero))


def check_arguments(loss_fn: Any, zero: Any) -> None:
    """Raises TypeError if `loss_fn` is not callable or `zero` is not a `Zero`."""
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn`: expected a function; got {type(loss_fn).__name__}. Give the function that computes "
            "the loss, then call the result with that function's arguments."
        )
    if not isinstance(zero, Zero | None):
        raise TypeError(
            f"`zero`: expected a fp8jax.comm.Zero or None; got {zero!r}. Make one, as in "
            "fp8jax.comm.Zero(mesh, recipe, stage=2)."
        )


def for_optimizers(loss_fn: Callable[..., Any], has_aux: bool, grad_fn: GradFn) -> Callable[..., Any]:
    """The gradient function for whole variables and for parameters alone, with an optimizer's inputs as its
    outputs: `settled` scaling states, `ScaledGradient`s, and for whole variables `Gradients`.

    Args:
        loss_fn, has_aux: see `value_and_grad`.
        grad_fn: computes the gradients.
    """

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = has_params(variables)

        def loss_and_aux(variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            out = loss_fn(variables if is_whole else variables[PARAMS], *args, **kwargs)
            return _loss_and_aux(out, has_aux)

        out, grads = grad_fn(loss_and_aux, variables if is_whole else {PARAMS: variables}, args, kwargs)
        out = out if has_aux else out[0]
        if SCALING in grads:
            grads[SCALING] = _jitted_settled(grads[SCALING], variables[SCALING])
        grads[PARAMS] = as_gradients(grads[PARAMS])
        if not is_whole:
            return out, grads[PARAMS]
        whole = Gradients(grads)
        return out, whole if whole.others() else grads

    return wrapped


_jitted_settled = jax.jit(settled)


def on_one_device(
    context: ShardContext,
    loss_fn: Callable[..., Any],
    variables: Any,
    args: Any,
    kwargs: Any,
    part: Any = None,
) -> tuple[Any, Any]:
    """A `GradFn` on one device, perhaps one of many with its shards of the variables.

    `part` is the number of this part of the batch, by default the device's. The loss is divided by the number
    of devices. Dots reduce some gradients over the devices; `over_devices` reduces the others. The scaling
    states are not yet `settled`, so that they can be merged with those of other microbatches and devices.
    """

    def run(variables: Any) -> Any:
        inside = {name: tree for name, tree in variables.items() if name != LOSS_SCALE}
        inside[PARAMS] = params = context.whole(variables[PARAMS])
        old = variables.get(SCALING, {})
        if SCALING in variables:
            inside[SCALING] = for_part(old, context.device_index if part is None else part)
        scale = variables[LOSS_SCALE]["scale"] if LOSS_SCALE in variables else None
        scaled = functools.partial(_scaled_loss, loss_fn, context.devices, scale)
        out, grads, state = gradient(scaled, inside, args, kwargs, context.shardings)
        state = of_whole(from_cotangents(state), old)
        grads, state = quantized(grads, params, state, old, context.shardings)
        new = {PARAMS: grads, **({SCALING: state} if SCALING in variables else {})}
        if scale is not None:
            new[PARAMS], new[LOSS_SCALE] = loss_scale.unscale(grads, variables[LOSS_SCALE])
        return out, new

    # JAX adds arrays of an extended dtype only in compiled code.
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variables))
    return run(variables) if is_traced else jax.jit(run)(variables)


def _scaled_loss(
    loss_fn: Callable[..., Any], devices: int, scale: Any, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The loss to differentiate, with loss scaling if `scale` is not None; and the loss to report with the
    auxiliary outputs."""
    loss, aux = loss_fn(*args, **kwargs)
    mean = loss if devices == 1 else loss / devices
    return (mean if scale is None else mean * scale), (mean, aux)


def _loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    loss, aux = out if has_aux and is_pair else (out, None)
    is_scalar = isinstance(loss, float) or getattr(loss, "shape", None) == ()
    if (has_aux and not is_pair) or not is_scalar or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"`loss_fn`: expected a float scalar{' and auxiliary outputs' if has_aux else ''} as its result; "
            f"got {jax.tree.map(shown, out)}. Return the mean over the batch, and to return more than that, "
            "return a pair and pass `has_aux=True`."
        )
    return loss, aux
