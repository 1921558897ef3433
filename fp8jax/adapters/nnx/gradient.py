"""Gradients of a loss of an NNX module, or of its states, by way of variables that are nested dicts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8jax.adapters.nnx.calls import check_kernels, refuse_assignments, with_nodes, without_nodes
from fp8jax.adapters.nnx.variables import FP8State, Frozen, LossScale, changed, put_in, tree_of, values_of
from fp8jax.gradients.keys import check_given, fold_in
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params

# The parts of a module: trained parameters, scaling states, the loss scale, frozen parameters, all others.
KINDS = (nnx.Param, FP8State, LossScale, Frozen, ...)


def gradient_of_module(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    grad_of: Callable[[Callable[..., Any]], Any],
    merged: Callable[[Any], Any],
    parts: int,
) -> Callable[..., Any]:
    """A function that returns the gradient of a loss of a module.

    Args:
        loss_fn: `loss_fn(model, *args, **kwargs)`.
        has_aux: whether it also returns auxiliary outputs.
        grad_of: the gradient, with auxiliary outputs, of a loss of variables that are nested dicts.
        merged: one module state from the states of all microbatches and devices.
        parts: number of microbatches times devices; each has its own random streams.
    """

    @functools.wraps(loss_fn)
    def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        check_kernels(model)
        (args, kwargs), others = without_nodes((args, kwargs))
        check_given(args, kwargs, parts)
        nodes = model, *others
        graph, *parts_of_model, constant, rest = nnx.split(nodes, *_KINDS)
        params, states, scales = (state.get(0, nnx.State({})) for state in parts_of_model)
        variables = {PARAMS: params, SCALING: states}
        for _, variable in nnx.to_flat_state(scales):
            variables[LOSS_SCALE] = variable.get_value()

        def pure(variables: Any, number: Any, *args: Any, **kwargs: Any) -> Any:
            # Copies, which belong to this trace, so that it may change them.
            scale, constants, before = jax.tree.map(lambda x: x, (scales, constant, rest))
            if parts > 1:
                before = _with_keys(before, lambda key: fold_in(key, number[0]))
            old = values_of(before)
            of_model = map(_of_model, (variables[PARAMS], variables[SCALING], scale))
            inside, *others = nnx.merge(graph, *of_model, constants, before)
            refuse_assignments(others)
            args, kwargs = with_nodes((args, kwargs), others)
            out = loss_fn(inside, *args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            after = nnx.split((inside, *others), *_KINDS)[-1]
            return loss, (aux, _changed(after, old, parts))

        numbers = np.arange(parts, dtype=np.int32) if parts > 1 else None  # split as a batch is
        out, grads, new = gradient_of_states(pure, grad_of)(variables, numbers, *args, **kwargs)
        loss, (aux, after) = out
        nnx.update(nodes, merged(after))
        nnx.update(model, new[SCALING])
        for path, variable in nnx.to_flat_state(scales):
            nnx.update(model, nnx.from_flat_state([(path, variable.replace(new[LOSS_SCALE]))]))
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def _of_first(kind: Any) -> Callable[[Any, Any], bool]:
    return lambda path, variable: path[0] == 0 and isinstance(variable, kind)


# The parts of a model and the other NNX objects among a loss's arguments: the first three kinds of the model
# alone, what else stays, and all others, which the loss may change.
_KINDS = (*map(_of_first, KINDS[:3]), nnx.Any(*KINDS[:-1]), ...)


def _of_model(state: Any) -> nnx.State:
    """A state of the model as one of all nodes."""
    return nnx.State({0: state} if state else {})


def _changed(after: Any, old: dict[Any, Any], parts: int) -> nnx.State:
    """The variables that the loss changed or created; `old` has the values before.

    With several parts the keys of random streams stay, and a changed metric is refused.
    """
    found = []
    for path, variable in changed(after, old):
        if parts > 1 and isinstance(variable, nnx.metrics.MetricState):
            raise ValueError(
                "`loss_fn`: expected a loss that updates no nnx.Metric, with microbatches or `zero`, as "
                f"metrics of parts of a batch cannot be merged; it changes {'/'.join(map(str, path[1:]))!r}. "
                "Return the values with `has_aux=True`, and update the metric outside of the loss."
            )
        if parts == 1 or not (path in old and isinstance(variable, nnx.RngKey)):
            found.append((path, variable))
    return nnx.from_flat_state(found)


def gradient_of_states(
    loss_fn: Callable[..., Any], grad_of: Callable[[Callable[..., Any]], Any]
) -> Callable[..., Any]:
    """A function that returns the gradient of a loss of a module's states or of other variables.

    States are parameters alone, or collections with a state of parameters.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)`.
        grad_of: the gradient of a loss of variables that are nested dicts.
    """

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        states = variables if has_params(variables) else {PARAMS: variables}

        def with_states(trees: Any) -> Any:
            new = {
                name: put_in(states[name], tree) if isinstance(states[name], nnx.State) else tree
                for name, tree in trees.items()
            }
            return new if states is variables else new[PARAMS]

        def pure(trees: Any, *args: Any, **kwargs: Any) -> Any:
            return loss_fn(with_states(trees), *args, **kwargs)

        trees = {name: tree_of(s) if isinstance(s, nnx.State) else s for name, s in states.items()}
        out, grads, new = grad_of(pure)(trees, *args, **kwargs)
        params = states[PARAMS]
        return out, put_in(params, grads) if isinstance(params, nnx.State) else grads, with_states(new)

    return wrapped


def _with_keys(state: nnx.State, new: Callable[[Any], Any]) -> nnx.State:
    """The state with new keys of random streams."""
    return nnx.map_state(
        lambda _, x: x.replace(new(x.get_value())) if isinstance(x, nnx.RngKey) else x, state
    )


def mean_of_devices(state: nnx.State) -> nnx.State:
    """One state from the stacked states of the devices: intermediates concatenated, the mean of others."""

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        return x[0] + jnp.mean(x - x[:1], axis=0, dtype=x.dtype)

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x

    def merged(_: Any, variable: Any) -> Any:
        return jax.tree.map(rows if isinstance(variable, nnx.Intermediate) else mean, variable)

    return nnx.map_state(merged, state)
