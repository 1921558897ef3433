"""The shardings of optimizer states and scaled weights on a mesh, from those of the parameters."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.optim.storage import is_stored
from fp8jax.optim.wrappers import is_wrapper
from fp8jax.variables import params_of


def shardings(tree: Any, params: Any, of_params: Any) -> Any:
    """The shardings of an optimizer's state, or of another tree with arrays like the parameters.

        params = jax.eval_shape(init, key)
        of_params = jax.tree.map(lambda x: NamedSharding(mesh, spec_of(x)), params, is_leaf=is_scaled)
        of_state = fp8jax.optim.shardings(jax.eval_shape(tx.init, params), params, of_params)
        state = jax.jit(tx.init, out_shardings=of_state)(params)

    An array belongs to the parameter whose path its own path ends with. The codes of a `ScaledArray` or of
    an 8-bit moment get the parameter's sharding. Its scales are sharded along the axes that have several
    of them, if the devices divide these; else each device has them. Everything else, as counts, keys and
    arrays of another shape than their parameter's, is on all devices, too.

    Args:
        tree: the state, arrays or shapes: of any optimizer, also of `optax.chain`, `masked`,
            `multi_transform` and `MultiSteps`. Or the parameters themselves, whole variables, a `TrainState`,
            the `nnx.State` of a module.
        params: the parameters, or whole variables; arrays or shapes.
        of_params: a tree like `params` with a `NamedSharding` for each of them: for a `ScaledArray` one, or
            one for codes and scale each. It need not have the boxes of `params`.

    Returns:
        A tree like `tree` with a `NamedSharding` for each array, for `jax.jit` and `jax.device_put`.

    Raises:
        ValueError: `of_params` is another tree, or has something else than `NamedSharding`s.
    """
    found = {**_by_path(params, of_params), **_by_path(params_of(params), params_of(of_params))}
    if not found:
        raise ValueError("`params`: expected parameters; got none.")
    mesh = next(iter(found.values()))[1].mesh
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of_node(path: Any, node: Any) -> Any:
        names = _names(path)
        suffixes = (names[start:] for start in range(len(names) + 1))
        shape, sharding = next((found[name] for name in suffixes if name in found), ((), everywhere))
        shape, sharding = (shape, sharding) if shape == _shape(node) else ((), everywhere)
        return jax.tree.map(lambda x: _of_part(sharding, shape, np.shape(x)), node)

    return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=_is_leaf)


def _by_path(params: Any, of_params: Any) -> dict[tuple[str, ...], tuple[tuple[int, ...], NamedSharding]]:
    """The shape and the sharding of each parameter's codes by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_leaf)
    try:
        given = [jax.tree.leaves(node) for node in treedef.flatten_up_to(of_params)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"`of_params`: expected a tree like `params`; got another: {error}") from None
    for each in given:
        if not each or not isinstance(each[0], NamedSharding):
            kind = type(each[0]).__name__ if each else "nothing"
            raise ValueError(
                f"`of_params`: expected a jax.sharding.NamedSharding for each array; got {kind}."
            )
    return {_names(path): (_shape(node), each[0]) for (path, node), each in zip(leaves, given, strict=True)}


def _is_leaf(node: Any) -> bool:
    return is_stored(node) or is_wrapper(node)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _shape(node: Any) -> Any:
    """The shape of an array, or of the codes, which are the first of several."""
    return next((np.shape(x) for x in jax.tree.leaves(node)), None)


def _of_part(sharding: NamedSharding, whole: tuple[int, ...], part: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array with `part` scales for the blocks of a sharded one."""
    if part == whole:
        return sharding
    spec = []
    if len(part) == len(whole):
        names = (*sharding.spec, *(None,) * (len(whole) - len(sharding.spec)))
        for name, dim, n in zip(names, whole, part, strict=True):
            is_sharded = n > 1 and dim % n == 0 and n % _devices(sharding, name) == 0
            spec.append(name if is_sharded else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _devices(sharding: NamedSharding, name: Any) -> int:
    """The number of devices along an entry of a spec: None, a mesh axis, or several."""
    axes = name if isinstance(name, tuple) else () if name is None else (name,)
    return math.prod(sharding.mesh.shape[axis] for axis in axes)
