"""Flax variables, and optimizer states, as leaves by name.

Linen keeps the scaling state of a kernel in a separate collection, NNX beside the kernel:

    {"params": {"fc": {"kernel": k}}, "_overwrite_with_gradient": {"fc": {"kernel": {"scale": s}}}}
    {"fc": {"kernel": k, "kernel__fp8_scale": s}}

Boxes around arrays (`nnx.Variable`, `nn.Partitioned`) and containers (`nnx.State`, `FrozenDict`) stay: a tree
with new leaves has the structure of the old tree.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.adapters.nnx.variables import STATE
from fp8jax.quantization import ScaledArray, is_scaled
from fp8jax.rewrite import names_of
from fp8jax.scaling.delayed import ONE
from fp8jax.scaling.old_states import ONLY_JAX
from fp8jax.variables import PARAMS, SCALING

ROOT = ".root"  # the end of the name of a second moment that is stored as its root

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tree:
    """The leaves of a tree by name, in order; `ScaledArray`s are leaves."""

    leaves: dict[Key, Any]
    treedef: Any = None
    has_collections: bool = True

    def weight(self, path: Key) -> Key:
        """The name of the model's array at `path`."""
        return (PARAMS, *path) if self.has_collections else path

    def state(self, path: Key, entry: str) -> Key:
        """The name of an entry of the scaling state of the array at `path`."""
        if self.has_collections:
            return (SCALING, *path, entry)
        return (*path[:-1], f"{path[-1]}{STATE}{entry}")

    def is_torchs(self, key: Key) -> bool:
        """Whether a torch model has such a leaf: parameters and scaling states, except `ONLY_JAX`."""
        if self.has_collections and key[0] not in (PARAMS, SCALING):
            return False
        return _entry(key) not in ONLY_JAX

    def ones(self) -> dict[Key, jax.Array]:
        """The entries `ONE` of scaling states, which torch does not have."""
        new = {}
        for key, leaf in self.leaves.items():
            if _entry(key) == ONE and (not self.has_collections or key[0] == SCALING):
                old = codes_and_scale(leaf)[0]
                new[key] = jnp.ones(old.shape, old.dtype, device=getattr(old, "sharding", None))
        return new

    def below(self, prefix: Key, suffix: Key = ()) -> "Tree":
        """The leaves with names that begin and end so, by the names between; without collections."""
        first, last = len(prefix), -len(suffix) or None
        found = {key[first:last]: leaf for key, leaf in self.leaves.items() if key[:first] == prefix}
        return Tree(found, has_collections=False)

    def rebuilt(self, new: Mapping[Key, Any]) -> Any:
        """The tree with new leaves in the boxes of the old leaves; leaves without a new value stay."""
        leaves = {**self.leaves, **new}
        for key in new:
            if is_scaled(old := self.leaves[key]):  # NNX's optimizers box codes and scales
                leaves[key] = jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new[key]))
        return jax.tree.unflatten(self.treedef, leaves.values())


def _entry(key: Key) -> str:
    """The name of an entry of a scaling state, without the name of an NNX parameter."""
    return key[-1].split(STATE)[-1]


def named(tree: Any) -> Tree:
    """The leaves of variables or of an optimizer's state, by name."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_scaled)
    names = names_of([path for path, _ in pairs])
    leaves = {_with_root(path, each): leaf for (path, leaf), each in zip(pairs, names, strict=True)}
    return Tree(leaves, treedef, any(key[0] == PARAMS for key in leaves))


def codes_and_scale(leaf: Any) -> tuple[Any, Any]:
    """Codes and scale of a leaf, without boxes; a plain array has the scale None."""
    arrays = jax.tree.leaves(leaf)
    return (arrays[0], ScaledArray.tree_unflatten(None, arrays).scale if is_scaled(leaf) else None)


def _with_root(path: Any, names: Key) -> Key:
    """The names of a leaf, with `ROOT` for the attribute of a box around a moment's root."""
    return (*names[:-1], ROOT) if len(path) > 1 and getattr(path[-1], "name", "") == "root" else names
