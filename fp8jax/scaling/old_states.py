"""Scaling states of 0.1.0, which still load: they have an entry that is not read, and lack `delayed.ONE`."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fp8jax.scaling.delayed import ONE
from fp8jax.scaling.merge import is_state

_OLD = "wgrad_scale"
# Entries that torch's scaling states do not have.
ONLY_JAX = (_OLD, ONE)


def are_old(names: Iterable[str]) -> bool:
    """Whether a checkpoint with arrays of these names has states of 0.1.0, or none with the entry `ONE`."""
    return not any(name.endswith(f"[{ONE!r}]") for name in names)


def without_unread(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state, or the arrays of a checkpoint, by name, without the entry that is not read."""
    return {name: x for name, x in entries.items() if name != _OLD and not name.endswith(f"[{_OLD!r}]")}


def without_one(tree: PyTree) -> PyTree:
    """The tree with the states of 0.1.0."""
    drop = lambda node: {name: node[name] for name in node if name != ONE} if is_state(node) else node  # noqa: E731
    return jax.tree.map(drop, tree, is_leaf=is_state)


def with_one(tree: PyTree) -> PyTree:
    """The inverse of `without_one`."""
    add = lambda node: {**node, ONE: jnp.ones_like(node["scale"])} if is_state(node) else node  # noqa: E731
    return jax.tree.map(add, tree, is_leaf=is_state)
