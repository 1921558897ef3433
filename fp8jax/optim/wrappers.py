"""Wrapping and unwrapping of `nnx.Variable`s, and of Linen's boxes of axis names, in optimizer trees.

A variable and a box are recognized by their methods, because this package does not import flax. A step takes
the values of variables. A box stays around its parameter in the step, and is around the codes in a state.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from fp8jax.optim.storage import Storage, is_stored
from fp8jax.quantization import ScaledArray, is_scaled


def with_variables_inside(tree: Any) -> Any:
    """Moves each `nnx.Variable` and box inside its `ScaledArray` or `Storage`, around the codes, and removes
    variables of None.

    `nnx.Optimizer` calls `init` with variables and `update` with their values. It then writes the new state
    back array by array, so each array needs a variable. A mapping has no key for a parameter without an
    array. The names of axes in a box are those of the codes: by a box around a `ScaledArray`,
    `nn.get_partition_spec` would shard its scale, too.
    """

    def turned(node: Any) -> Any:
        raw, wrap = _opened(node)
        if isinstance(raw, ScaledArray):
            return ScaledArray(wrap(raw.data), raw.scale)
        if isinstance(raw, Storage):
            codes = dataclasses.fields(raw)[0].name
            return dataclasses.replace(raw, **{codes: turned(wrap(getattr(raw, codes)))})
        return node

    return jax.tree.map(turned, _without_empty(tree), is_leaf=is_wrapper)


def _without_empty(tree: Any, parent: Any = None) -> Any:
    """The tree without variables of None. Those outside of mappings become None."""
    if isinstance(tree, Mapping):
        below = {key: (child, _without_empty(child, tree)) for key, child in tree.items()}
        entries = {key: new for key, (old, new) in below.items() if not _is_nothing(new) or _is_nothing(old)}
        return _mapping(tree, parent, entries)
    return None if _is_variable(tree) and tree.get_raw_value() is None else tree


def _is_nothing(node: Any) -> bool:
    return node is None or (isinstance(node, Mapping) and not node)


def _mapping(like: Any, parent: Any, new: dict[Any, Any]) -> Any:
    """A mapping of the class of `like`; `like` itself if nothing is new."""
    # Flax's mappings store dicts, and show each as a mapping of their own class.
    if type(like) is type(parent) and not isinstance(like, dict):
        return new
    is_same = like.keys() == new.keys() and all(new[key] is like[key] for key in new)
    return like if is_same else type(like)(new)


def _is_variable(node: Any) -> bool:
    return hasattr(node, "get_raw_value")


def _is_box(node: Any) -> bool:
    return hasattr(node, "replace_boxed")


def is_wrapper(node: Any) -> bool:
    """Whether a tree node is an `nnx.Variable` or a box."""
    return _is_variable(node) or _is_box(node)


def _opened(node: Any) -> tuple[Any, Any]:
    """The content of a variable or a box, and the function that replaces it; None for other nodes."""
    if _is_variable(node):
        return node.get_raw_value(), node.replace
    if _is_box(node):
        return jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0], node.replace_boxed
    return None, None


def _box_in(node: Any) -> Any:
    """The box around the codes of a `ScaledArray` or `Storage`; None if there is none."""
    inside = jax.tree.leaves(node, is_leaf=_is_box)[:1] if is_stored(node) else []
    return inside[0] if any(map(_is_box, inside)) else None


def without_variables(tree: Any) -> Any:
    """The tree with each `nnx.Variable` replaced by its value, and each box around its whole array."""

    def opened(node: Any) -> Any:
        if (box := _box_in(node)) is not None:
            codes, put = _opened(box)
            return put(jax.tree.map(lambda x: codes if x is box else x, node, is_leaf=_is_box))
        return node.get_raw_value() if _is_variable(node) else node

    return jax.tree.map(opened, tree, is_leaf=lambda node: _is_variable(node) or _box_in(node) is not None)


def filled(tree: Any, like: Any, parent: Any = None) -> Any:
    """The tree with None for each key of `like` that `with_variables_inside` removed."""
    if not isinstance(tree, Mapping) or not isinstance(like, Mapping):
        return tree
    new = {
        key: filled(tree.get(key, {} if isinstance(below, Mapping) else None), below, tree)
        for key, below in like.items()
    }
    return _mapping(tree, parent, {**tree, **new})


def in_variables(boxes: Any, tree: Any) -> Any:
    """The inverse of `without_variables` and `filled`: `tree` with its leaves in the variables of `boxes`."""

    def is_place(node: Any) -> bool:
        if node is None or _is_variable(node) or _box_in(node) is not None:
            return True
        return is_scaled(node) and not _is_variable(node.data)

    def put(box: Any, node: Any) -> Any:
        if _box_in(box) is not None:
            return with_variables_inside(node)
        return box.replace(node) if _is_variable(box) else node

    return jax.tree.map(put, boxes, _with_keys_of(boxes, tree), is_leaf=is_place)


def _with_keys_of(boxes: Any, tree: Any, parent: Any = None) -> Any:
    if not isinstance(boxes, Mapping) or not isinstance(tree, Mapping):
        return tree
    new = {key: _with_keys_of(below, tree[key], tree) for key, below in boxes.items()}
    return _mapping(tree, parent, new)
