"""Wrapping and unwrapping of `nnx.Variable`s in optimizer trees.

A variable is recognized by its methods, because this package does not import flax.
"""

import dataclasses
from typing import Any

import jax

from fp8jax.optim.step.blockwise import Blockwise
from fp8jax.optim.step.codecs import Root
from fp8jax.quantization import ScaledArray, is_scaled


def with_variables_inside(tree: Any) -> Any:
    """Moves each `nnx.Variable` inside its `ScaledArray` or `Blockwise`, around the codes.

    `nnx.Optimizer` calls `init` with variables and `update` with their values. It then writes the new state
    back array by array, so each array needs a variable.
    """

    def turned(node: Any) -> Any:
        kept = node.get_raw_value() if _is_variable(node) else None
        if isinstance(kept, ScaledArray):
            return ScaledArray(node.replace(kept.data), kept.scale)
        if isinstance(kept, Root):
            return Root(turned(node.replace(kept.root)))
        if isinstance(kept, Blockwise):
            return dataclasses.replace(kept, codes=node.replace(kept.codes))
        return node

    return jax.tree.map(turned, tree, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return hasattr(node, "get_raw_value")


def without_variables(tree: Any) -> Any:
    """The tree with each `nnx.Variable` replaced by its value."""

    def opened(node: Any) -> Any:
        return node.get_raw_value() if _is_variable(node) else node

    return jax.tree.map(opened, tree, is_leaf=_is_variable)


def in_variables(boxes: Any, tree: Any) -> Any:
    """The inverse of `without_variables`: `tree` with its leaves in the variables of `boxes`."""

    def is_place(node: Any) -> bool:
        return node is None or _is_variable(node) or (is_scaled(node) and not _is_variable(node.data))

    def put(box: Any, node: Any) -> Any:
        return box.replace(node) if _is_variable(box) else node

    return jax.tree.map(put, boxes, tree, is_leaf=is_place)
