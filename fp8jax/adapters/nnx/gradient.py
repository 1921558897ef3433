"""The gradient of a loss of an NNX module, or of its states, by way of variables of dicts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8jax.adapters.nnx.variables import FP8State, Frozen, LossScale, state_path
from fp8jax.gradients.keys import fold_in
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params

# What of a model is trained, what is scaled with, what does not change, and the rest.
KINDS = (nnx.Param, FP8State, LossScale, Frozen, ...)


def gradient_of_module(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    grad_of: Callable[[Callable[..., Any]], Any],
    last: Callable[[Any], Any] = lambda aux: aux,
    parts: int = 1,
) -> Callable[..., Any]:
    """A function that gives the gradient of a loss of a module.

    Args:
        loss_fn: `loss_fn(model, *args, **kwargs)`.
        has_aux: whether it gives more than the loss.
        grad_of: the gradient, with auxiliary outputs, of a loss of variables.
        last: of the auxiliary outputs that the gradient gives, the last call's.
        parts: in how many the batch is split: each has random streams of its own.
    """

    @functools.wraps(loss_fn)
    def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        graph, params, states, scales, frozen, rest = nnx.split(model, *KINDS)
        variables = {PARAMS: tree_of(params), SCALING: tree_of(states)}
        for _, variable in nnx.to_flat_state(scales):
            variables[LOSS_SCALE] = variable.get_value()

        def pure(variables: Any, number: Any, *args: Any, **kwargs: Any) -> Any:
            # New variables, which belong to this trace and may be changed in it.
            others = jax.tree.map(lambda x: x, (scales, frozen, rest))
            if parts > 1:
                others = (*others[:2], _with_keys(others[2], lambda key: fold_in(key, number[0])))
            inside = put_in(params, variables[PARAMS]), put_in(states, variables[SCALING]), *others
            inside = nnx.merge(graph, *inside)
            out = loss_fn(inside, *args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            *_, after = nnx.split(inside, *KINDS)
            if parts > 1:
                after = _with_keys(after, dict(_keys(rest)))
            return loss, (aux, after)

        numbers = np.arange(parts, dtype=np.int32) if parts > 1 else None  # split as a batch is
        (loss, (aux, after)), grads = grad_of(pure)(variables, numbers, *args, **kwargs)
        nnx.update(model, last(after), put_in(states, grads[SCALING]))
        for path, variable in nnx.to_flat_state(scales):
            nnx.update(model, nnx.from_flat_state([(path, variable.replace(grads[LOSS_SCALE]))]))
        grads = put_in(params, grads[PARAMS])
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def is_split(variables: Any) -> bool:
    """Whether variables are `nnx.State`s: the parameters alone, or collections of which they are one."""
    params = variables[PARAMS] if has_params(variables) else variables
    return isinstance(params, nnx.State)


def gradient_of_states(
    loss_fn: Callable[..., Any], grad_of: Callable[[Callable[..., Any]], Any]
) -> Callable[..., Any]:
    """A function that gives the gradient of a loss of a module's states, see `is_split`.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)`.
        grad_of: the gradient of a loss of variables that are trees of dicts.
    """

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        is_alone = not has_params(variables)
        states = {PARAMS: variables} if is_alone else variables

        def with_states(trees: Any) -> Any:
            return {
                name: put_in(states[name], tree) if isinstance(states[name], nnx.State) else tree
                for name, tree in trees.items()
            }

        def pure(trees: Any, *args: Any, **kwargs: Any) -> Any:
            inside = with_states(trees)
            return loss_fn(inside[PARAMS] if is_alone else inside, *args, **kwargs)

        trees = {name: tree_of(s) if isinstance(s, nnx.State) else s for name, s in states.items()}
        out, grads = grad_of(pure)(trees, *args, **kwargs)
        grads = with_states(grads)
        return out, grads[PARAMS] if is_alone else grads

    return wrapped


def _keys(state: Any) -> list[tuple[Any, Any]]:
    """The paths and keys of random streams."""
    found = nnx.to_flat_state(state)
    return [(path, each.get_value()) for path, each in found if isinstance(each, nnx.RngKey)]


def _with_keys(state: Any, new: Any) -> Any:
    """The state with other keys: a function of the old ones, or keys by path."""
    flat = []
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.RngKey) and (callable(new) or path in new):
            variable = variable.replace(new(variable.get_value()) if callable(new) else new[path])
        flat.append((path, variable))
    return nnx.from_flat_state(flat)


def of_devices(state: Any) -> Any:
    """One state of those of the devices, stacked: rows of intermediates put together, else the mean of
    what differs."""

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        return x[0] + jnp.mean(x - x[:1], axis=0, dtype=x.dtype)

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x

    flat = []
    for path, variable in nnx.to_flat_state(state):
        merge = rows if isinstance(variable, nnx.Intermediate) else mean
        flat.append((path, jax.tree.map(merge, variable)))
    return nnx.from_flat_state(flat)


def tree_of(state: Any) -> dict[Any, Any]:
    """The values of a state of variables, or of their values, as nested dicts; a scaling state is one in its
    kernel's place."""
    tree: dict[Any, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = state_path(path)
        below = tree
        for part in parents:
            below = below.setdefault(part, {})
        below[name] = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return tree


def put_in(state: Any, tree: Any) -> Any:
    """The state with the values of such a tree."""

    def found(path: Any) -> Any:
        return functools.reduce(lambda below, part: below[part], state_path(path), tree)

    def replaced(variable: Any, new: Any) -> Any:
        return variable.replace(new) if isinstance(variable, nnx.Variable) else new

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, replaced(variable, found(path))) for path, variable in flat])
