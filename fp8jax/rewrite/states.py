"""The scaling states of a program's dot products, and its kernels in their formats."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.dot import init_ragged_state, init_state
from fp8jax.quantization import is_scaled, quantize
from fp8jax.rewrite.plan import Chosen
from fp8jax.rewrite.program import Program
from fp8jax.variables import SCALING


def first_state(chosen: Chosen) -> Any:
    """The initial scaling state, with a leading axis for each scan that slices the kernel."""
    dot, recipe = chosen.dot, chosen.recipe
    if recipe.gemm != "FP8":
        return {}
    state = init_ragged_state(recipe, dot.groups) if dot.groups else init_state(recipe)
    if chosen.key != dot.path:
        state.pop("wgrad_scale", None)  # the parameter has one gradient
    layers = tuple(length for _, length in dot.loops)
    # On a mesh with explicit axes the copy has the same type as the states that a step returns.
    return {name: jnp.copy(jnp.broadcast_to(x, (*layers, *x.shape))) for name, x in state.items()}


def kernels_of(program: Program) -> dict[tuple[str, ...], Chosen]:
    """The kernels of the plan by path. If several dot products use a kernel, the use inside the most scans
    decides its number of scales."""
    kernels: dict[tuple[str, ...], Chosen] = {}
    for chosen in program.context.plan.chosen.values():
        path = chosen.dot.path or ()
        if path not in kernels or kernels[path].dot.depth < chosen.dot.depth:
            kernels[path] = chosen
    return kernels


def with_kernels(
    params: Any,
    program: Program,
    kernels: Mapping[tuple[str, ...], Chosen],
    change: Callable[[Any, Chosen], Any],
) -> Any:
    """The parameters with `change(leaf, chosen)` for each kernel."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_scaled)
    pairs = zip(leaves, program.paths, strict=True)
    return treedef.unflatten([change(leaf, kernels[p]) if p in kernels else leaf for leaf, p in pairs])


def put(tree: dict[str, Any], path: Sequence[str], new: Any) -> None:
    """Inserts `new` into nested dicts."""
    if not path:
        tree.update(new)
        return
    *parents, name = path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = new


def layers_of(chosen: Chosen) -> tuple[int, ...]:
    """The leading axes of a kernel with a scale for each index: layers, then experts."""
    layers = tuple(length for _, length in chosen.dot.loops)
    return (*layers, chosen.dot.groups) if chosen.dot.groups else layers


def rank_of(leaf: Any, chosen: Chosen) -> int:
    """The rank of the array that one scale covers."""
    return len(leaf.shape) - len(layers_of(chosen))


def in_format(leaf: Any, chosen: Chosen) -> Any:
    """A kernel in its recipe's weight format."""
    if is_scaled(leaf) or chosen.recipe.weight == "FP32":
        return leaf
    blocks = (*layers_of(chosen), *(1,) * rank_of(leaf, chosen))
    q = quantize(leaf, formats.get(chosen.recipe.weight), power_of_two=True, blocks=blocks)
    return q.with_own_dtype(leaf.dtype)


def state_of(states: Mapping[str, Any], chosen: Chosen) -> Any:
    """The scaling state of a dot product; {} if it has none.

    Raises:
        ValueError: `states` lack it.
    """
    fresh = first_state(chosen)
    if not fresh:
        return fresh
    found: Any = states
    for name in chosen.key:
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None and chosen.key != chosen.dot.path:
        return state_of(states, dataclasses.replace(chosen, key=chosen.dot.path))  # merged by max
    if found is None:
        raise ValueError(
            f"`variables`: expected the scaling state of {'/'.join(chosen.key)!r} in the collection "
            f"{SCALING!r}; got none. Take it from `model.init(...)`, and give `apply` all of the variables, "
            "not 'params' alone."
        )
    return found
