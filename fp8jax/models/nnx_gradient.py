"""The gradient of a loss of an NNX module, by way of variables as `gradients` takes them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp8jax.models.nnx import STATE, FP8State, LossScale
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

# What of a model is trained, what is scaled with, and the rest.
KINDS = (nnx.Param, FP8State, LossScale, ...)


def gradient_of_module(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    grad_of: Callable[[Callable[..., Any]], Any],
    last: Callable[[Any], Any] = lambda aux: aux,
) -> Callable[..., Any]:
    """A function that gives the gradient of a loss of a module.

    Args:
        loss_fn: `loss_fn(model, *args, **kwargs)`.
        has_aux: whether it gives more than the loss.
        grad_of: the gradient, with auxiliary outputs, of a loss of variables.
        last: of the auxiliary outputs that the gradient gives, the last call's.
    """

    @functools.wraps(loss_fn)
    def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        graph, params, states, scales, rest = nnx.split(model, *KINDS)
        variables = {PARAMS: tree_of(params), SCALING: tree_of(states)}
        for _, variable in nnx.to_flat_state(scales):
            variables[LOSS_SCALE] = variable.get_value()

        def pure(variables: Any, *args: Any, **kwargs: Any) -> Any:
            # New variables, which belong to this trace and may be changed in it.
            others = jax.tree.map(lambda x: x, (scales, rest))
            inside = put_in(params, variables[PARAMS]), put_in(states, variables[SCALING]), *others
            inside = nnx.merge(graph, *inside)
            out = loss_fn(inside, *args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            *_, after = nnx.split(inside, *KINDS)
            return loss, (aux, after)

        (loss, (aux, after)), grads = grad_of(pure)(variables, *args, **kwargs)
        nnx.update(model, last(after), put_in(states, grads[SCALING]))
        for path, variable in nnx.to_flat_state(scales):
            nnx.update(model, nnx.from_flat_state([(path, variable.replace(grads[LOSS_SCALE]))]))
        grads = put_in(params, grads[PARAMS])
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def tree_of(state: Any) -> dict[Any, Any]:
    """The values of a state as nested dicts; a scaling state is one in its kernel's place."""
    tree: dict[Any, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = _path(path)
        below = tree
        for part in parents:
            below = below.setdefault(part, {})
        below[name] = variable.get_value()
    return tree


def put_in(state: Any, tree: Any) -> Any:
    """The state with the values of such a tree."""

    def found(path: Any) -> Any:
        return functools.reduce(lambda below, part: below[part], _path(path), tree)

    return nnx.from_flat_state(
        [(path, variable.replace(found(path))) for path, variable in nnx.to_flat_state(state)]
    )


def _path(path: Any) -> list[Any]:
    *parents, name = path
    return [*parents, *(name.split(STATE) if isinstance(name, str) else [name])]
