"""`value_and_grad` and `accumulate_gradients` for variables, NNX modules and NNX states."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from fp8jax import gradients
from fp8jax.adapters.nnx import is_module
from fp8jax.adapters.nnx.gradient import gradient_of_module, gradient_of_states, mean_of_devices
from fp8jax.comm import Zero
from fp8jax.gradients.loss import AxisNames
from fp8jax.variables import PARAMS, has_params


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    zero: Zero | None = None,
    axis_name: AxisNames = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for models with quantized weights and scaling state.

        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables, batch)
        loss, grads = fp8jax.value_and_grad(loss_fn)(nnx_module, batch)

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` or `loss_fn(nnx_module, *args, **kwargs)`; returns a
            scalar, or with `has_aux` a scalar and auxiliary outputs. Variables may be Flax variables, a tree
            of parameters, an `nnx.State` of parameters, or `{"params": state, "_overwrite_with_gradient":
            state}` of `nnx.Param`s and `FP8State`s.
        has_aux: as in `jax.value_and_grad`.
        zero: shards the batch over devices, see `fp8jax.gradients.value_and_grad`. The statistics of an NNX
            module become the mean over the devices, intermediates are concatenated, and each device has its
            own random streams.
        axis_name: inside a `jax.shard_map` of yours, the mesh axes over which the batch is split, see
            `fp8jax.gradients.value_and_grad`.

    Returns:
        A function of the same arguments. For variables it returns `(loss, grads, variables)`; the gradients
        are a tree like the parameters, and the variables have the new scaling state, see
        `fp8jax.gradients.value_and_grad`. For a module it returns the loss and an `nnx.State` of gradients of
        its `nnx.Param`s, as `nnx.value_and_grad` does, and writes the new scaling state and statistics to the
        module. NNX objects among the other arguments, such as `nnx.Rngs` or a second module, keep what the
        loss changes in them. They are not split as a batch is, and have no gradient.
    """
    grad_of = functools.partial(gradients.value_and_grad, zero=zero, axis_name=axis_name)
    return _of_any(loss_fn, has_aux, grad_of, zero, None)


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    microbatches: int,
    *,
    has_aux: bool = False,
    format: str = "FP16",
    zero: Zero | None = None,
    axis_name: AxisNames = None,
    keys: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` in sequential microbatches, with the peak memory of one microbatch.

    For the arguments see `fp8jax.gradients.accumulate_gradients`. Pass random keys as keyword arguments and
    name them in `keys`; each microbatch, and with `zero` each device, gets its own key. The random streams of
    an NNX module, and an `nnx.Rngs` among the arguments, need no name. All microbatches see the incoming
    statistics; the last one's are returned.
    """
    options = {"format": format, "zero": zero, "axis_name": axis_name, "keys": keys}
    grad_of = functools.partial(gradients.accumulate_gradients, microbatches=microbatches, **options)
    return _of_any(loss_fn, has_aux, grad_of, zero, microbatches)


def _of_any(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    grad_of: Callable[..., Any],
    zero: Zero | None,
    microbatches: int | None,
) -> Callable[..., Any]:
    """The gradient function for variables, modules and states."""

    def merged(states: Any) -> Any:
        last = states if microbatches is None else jax.tree.map(lambda x: x[-1], states)
        return last if zero is None else mean_of_devices(last)

    of_variables = grad_of(loss_fn, has_aux=has_aux)
    of_states = gradient_of_states(loss_fn, functools.partial(grad_of, has_aux=has_aux))
    parts = (microbatches or 1) * (1 if zero is None else zero.devices)
    of_module = gradient_of_module(loss_fn, has_aux, functools.partial(grad_of, has_aux=True), merged, parts)

    @functools.wraps(loss_fn)
    def of_any(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_module(model):
            return of_module(model, *args, **kwargs)
        is_split = isinstance(model[PARAMS] if has_params(model) else model, nnx.State)
        return (of_states if is_split else of_variables)(model, *args, **kwargs)

    return of_any
