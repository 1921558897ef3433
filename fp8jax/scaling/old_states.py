"""Scaling states of 0.1.0, which still load: they have an entry that is not read, and lack `delayed.ONE`."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fp8jax.scaling.delayed import ONE
from fp8jax.scaling.merge import is_state

OLD = "wgrad_scale"


def without_one(tree: PyTree) -> PyTree:
    """The tree with the states of 0.1.0."""
    drop = lambda node: {name: node[name] for name in node if name != ONE} if is_state(node) else node  # noqa: E731
    return jax.tree.map(drop, tree, is_leaf=is_state)


def with_one(tree: PyTree) -> PyTree:
    """The inverse of `without_one`."""
    add = lambda node: {**node, ONE: jnp.ones_like(node["scale"])} if is_state(node) else node  # noqa: E731
    return jax.tree.map(add, tree, is_leaf=is_state)
