"""Flax variables as leaves by name, whatever they are kept in.

Linen keeps the scaling state of a kernel in a collection of its own and NNX beside the kernel:

    {"params": {"fc": {"kernel": k}}, "_overwrite_with_gradient": {"fc": {"kernel": {"scale": s}}}}
    {"fc": {"kernel": k, "kernel__fp8_scale": s}}

Boxes around arrays (`nnx.Variable`, `nn.Partitioned`) and containers (`nnx.State`, `FrozenDict`) are kept:
a tree with new leaves is of the same structure as the old one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from fp8jax.quantization import ScaledArray, is_scaled

PARAMS = "params"
SCALING = "_overwrite_with_gradient"
NNX_STATE = "__fp8_"  # between a parameter's name and that of an entry of its scaling state
# Written by each step before it is read, and JAX's alone.
PASSING = "wgrad_scale"

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree's leaves by their names, in its order; `ScaledArray`s are leaves."""

    leaves: dict[Key, Any]
    treedef: Any = None
    has_collections: bool = True

    def weight(self, path: Key) -> Key:
        """The name of a model's own array."""
        return (PARAMS, *path) if self.has_collections else path

    def state(self, path: Key, entry: str) -> Key:
        """The name of an entry of the scaling state of the array at `path`."""
        if self.has_collections:
            return (SCALING, *path, entry)
        return (*path[:-1], f"{path[-1]}{NNX_STATE}{entry}")

    def is_torchs(self, key: Key) -> bool:
        """Whether a torch model has what is in the leaf: not so of `PASSING`, nor of other collections."""
        if self.has_collections and key[0] not in (PARAMS, SCALING):
            return False
        return key[-1] != PASSING and not key[-1].endswith(NNX_STATE + PASSING)

    def below(self, prefix: Key) -> "Tree":
        """The leaves below a name, under what is left of theirs; without collections."""
        depth = len(prefix)
        found = {key[depth:]: leaf for key, leaf in self.leaves.items() if key[:depth] == prefix}
        return Tree(found, has_collections=False)

    def rebuilt(self, new: Mapping[Key, Any]) -> Any:
        """The tree with new leaves, each in what the old one was in; those that are not named stay."""
        leaves = [boxed_as(old, new[key]) if key in new else old for key, old in self.leaves.items()]
        return jax.tree.unflatten(self.treedef, leaves)


def named(tree: Any) -> Tree:
    """The leaves of Flax variables, or of an optimizer's state, by name."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_scaled)
    leaves = {_name_of(path): leaf for path, leaf in pairs}
    return Tree(leaves, treedef, any(key[0] == PARAMS for key in leaves))


def nested(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """A tree of dicts with these leaves."""
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = leaf
    return tree


def codes_and_scale(leaf: Any) -> tuple[Any, Any]:
    """The arrays of a leaf, without boxes; the scale is None if it has none."""
    arrays = jax.tree.leaves(leaf)
    return (arrays[0], ScaledArray.tree_unflatten(None, arrays).scale if is_scaled(leaf) else None)


def boxed_as(old: Any, new: Any) -> Any:
    """A leaf in the boxes, if any, that are around the arrays of another: optimizers of NNX have some."""
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)) if is_scaled(old) else new


def scaled(codes: Any, scale: Any) -> Any:
    """A leaf of these arrays."""
    return codes if scale is None else ScaledArray(codes, scale)


def _name_of(path: Any) -> Key:
    """The names on the way to a leaf, without the attribute that its box keeps it in."""
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return tuple(str(getattr(step, "key", getattr(step, "name", getattr(step, "idx", "")))) for step in path)
