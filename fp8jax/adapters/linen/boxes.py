"""Linen's boxes of axis names (`nn.Partitioned`) around kernels that are `ScaledArray`s."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.quantization import ScaledArray, is_scaled


def with_scaled_boxes(tree: Any) -> Any:
    """The tree with boxes for `ScaledArray`s around these."""
    return _map(lambda box: _scaled(box) if is_scaled(box.value) else box, tree)


def with_plain_boxes(tree: Any) -> Any:
    """The tree with the module's own boxes."""
    return _map(lambda box: box.plain(**vars(box)) if hasattr(box, "plain") else box, tree)


def without_constraints(tree: Any) -> Any:
    """The tree with boxes that add no sharding constraint when they are unboxed."""
    return _map(_scaled, tree)


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    def changed(node: Any) -> Any:
        return change(node) if isinstance(node, meta.Partitioned) else node

    return jax.tree.map(changed, tree, is_leaf=meta.is_axis_metadata)


def _scaled(box: Any) -> Any:
    return box if hasattr(box, "plain") else _class_for_scaled(type(box))(**vars(box))


@functools.cache
def _class_for_scaled(cls: type[meta.Partitioned]) -> type[meta.Partitioned]:
    """A class of boxes for `ScaledArray`s: axis names apply to the codes, and to axes with several scales."""

    def get_partition_spec(box: Any) -> Any:
        spec, kernel = cls.get_partition_spec(box), box.value
        if not is_scaled(kernel):
            return spec
        names = (name if n > 1 else None for name, n in zip(spec, kernel.scale.shape, strict=True))
        return ScaledArray(spec, PartitionSpec(*names))

    def get_sharding(box: Any, mesh: Any) -> Any:
        specs, is_spec = get_partition_spec(box), lambda x: isinstance(x, PartitionSpec)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    def unbox(box: Any, apply_constraint: bool = True) -> Any:
        del apply_constraint  # codes, scale and slot have different shapes
        return box.value

    members = {"plain": cls, "get_partition_spec": get_partition_spec, "get_sharding": get_sharding}
    members["unbox"] = unbox
    return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(members))
