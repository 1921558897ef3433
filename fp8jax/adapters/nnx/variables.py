"""The variables of a transformed NNX module, and the places of its parameters.

A kernel has its scaling state beside it, as `FP8State`s: `module.with_recipe` makes them, and `gradient`
renews them.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from fp8jax.quantization import is_scaled
from fp8jax.variables import PARAMS, SCALING

# The scaling state of `layer.kernel` is `layer.kernel__fp8_scale` and so on.
STATE = "__fp8_"

_CONTAINERS = (nnx.List, nnx.Dict)

# Metadata of a frozen parameter: its class before, if not `nnx.Param` itself.
CLASS = "class__fp8"


class FP8State(nnx.Variable):
    """An array of a dot product's scaling state (`fp8jax.dot.init_state`), stacked as the kernel is."""


class Frozen(nnx.Variable):
    """A parameter that is not trained, in a model with adapters."""


class LossScale(nnx.Variable):
    """The loss scale of a model with float16 GEMMs (`fp8jax.loss_scale`)."""


# The bridge from Linen asks for names.
for _name, _variable in (("fp8_state", FP8State), ("frozen", Frozen), ("loss_scale", LossScale)):
    nnx.register_variable_name(_name, _variable)


def modules_of(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """A module and the modules in it, by path; a list, so that a loop over it may change the model."""
    return list(nnx.iter_modules(model))


class VariablePlace(NamedTuple):
    """The place of a parameter."""

    owner: Any  # its module
    name: str  # its attribute; "a/b" for a parameter in an attribute that is a dict or a list, Flax's too
    param: Any


def places_of(model: nnx.Module) -> dict[tuple[str, ...], VariablePlace]:
    """The parameters of a module by path; a shared parameter at its first path."""
    # Flax's containers are modules, too, but their parameters are those of the module that has them.
    modules = {
        path: module for path, module in modules_of(model) if not path or not isinstance(module, _CONTAINERS)
    }
    places = {}
    for path, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param | Frozen):
            at = next(n for n in range(len(path) - 1, -1, -1) if path[:n] in modules)
            place = VariablePlace(modules[path[:at]], "/".join(map(str, path[at:])), param)
            places[tuple(map(str, path))] = place
    return places


def value_of(leaf: Any) -> Any:
    """The value of a leaf of a module's state: a variable, or an array that is an attribute itself."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def values_of(state: Any) -> dict[Any, list[Any]]:
    """The arrays of each variable of a state, by path."""
    return {path: jax.tree.leaves(value_of(variable)) for path, variable in nnx.to_flat_state(state)}


def changed(state: Any, before: dict[Any, list[Any]]) -> Iterator[tuple[Any, Any]]:
    """The variables, with their paths, that do not consist of the same arrays as `before`, or are new."""
    for path, variable in nnx.to_flat_state(state):
        old, new = before.get(path), jax.tree.leaves(value_of(variable))
        if old is None or len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
            yield path, variable


def state_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """The path of a variable in the tree of its collection: a scaling state's array is below its kernel."""
    *parents, name = path
    if not (isinstance(name, str) and STATE in name):
        return tuple(path)
    param, part = name.split(STATE)
    return (*parents, *param.split("/"), part)


def tree_of(state: Any) -> dict[Any, Any]:
    """A state as nested dicts of values, with the scaling state of a kernel at the kernel's path."""
    values = {state_path(path): value_of(variable) for path, variable in nnx.to_flat_state(state)}
    return unflatten_dict(values)


def put_in(state: Any, tree: Any) -> Any:
    """The state with the values of such a tree."""

    def replaced(path: Any, variable: Any) -> Any:
        new = functools.reduce(operator.getitem, state_path(path), tree)
        return variable.replace(new) if isinstance(variable, nnx.Variable) else new

    return nnx.map_state(replaced, state)


def collections_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """The parameters and scaling states of a module's state as a checkpoint has it, nested dicts.

    Integers and keys are random states, and left out.
    """
    collections: dict[str, dict[Any, Any]] = {PARAMS: {}, SCALING: {}}
    for path, x in jax.tree.leaves_with_path(arrays, is_leaf=is_scaled):
        names = tuple(step.key for step in path[:-1])  # the last one is "value", of the variable
        key = state_path(names)
        if is_scaled(x) or jnp.issubdtype(x.dtype, jnp.floating):
            collections[PARAMS if key == names else SCALING][key] = x
    return {name: unflatten_dict(leaves) for name, leaves in collections.items()}


def thaw(nodes: Any) -> None:
    """Makes frozen variables parameters again."""
    for _, variable in list(nnx.iter_graph(nodes)):
        if isinstance(variable, Frozen):
            cls = variable.get_metadata().get(CLASS, nnx.Param)
            if cls is not nnx.Param:
                variable.del_metadata(CLASS)
            object.__setattr__(variable, "__class__", cls)
