"""Linen's boxes of axis names around kernels that are `ScaledArray`s."""

import functools
import types
from typing import Any

import jax
from flax.core import meta
from jax.sharding import PartitionSpec

from fp8jax.quantization import ScaledArray, is_scaled


def boxed_as(boxed: Any, kernel: Any) -> Any:
    """A kernel in the box of axis names, if there is one, of another of its shape."""
    if is_scaled(kernel) and isinstance(boxed, meta.Partitioned) and not hasattr(boxed, "plain"):
        boxed = _box_of_scaled(type(boxed))(**vars(boxed))
    return meta.replace_boxed(boxed, kernel)


def with_own_boxes(tree: Any) -> Any:
    """The tree with boxes for `ScaledArray`s around these."""

    def own(node: Any) -> Any:
        return boxed_as(node, node.unbox(False)) if isinstance(node, meta.Partitioned) else node

    return jax.tree.map(own, tree, is_leaf=is_box)


def with_plain_boxes(tree: Any) -> Any:
    """The tree with the module's own boxes of axis names in the place of those of `ScaledArray`s."""

    def plain(node: Any) -> Any:
        return node.plain(**vars(node)) if hasattr(node, "plain") else node

    return jax.tree.map(plain, tree, is_leaf=is_box)


def with_quiet_boxes(tree: Any) -> Any:
    """The tree with boxes of axis names that constrain nothing when they are opened."""

    def quiet(node: Any) -> Any:
        if not isinstance(node, meta.Partitioned) or hasattr(node, "plain"):
            return node
        return _box_of_scaled(type(node))(**vars(node))

    return jax.tree.map(quiet, tree, is_leaf=is_box)


def is_box(node: Any) -> bool:
    """Whether it is a box around a parameter."""
    return isinstance(node, meta.AxisMetadata)


@functools.cache
def _box_of_scaled(cls: type[meta.Partitioned]) -> type[meta.Partitioned]:
    """A box of axis names for a `ScaledArray`: the codes have the names, the scale those of its own axes."""

    def get_partition_spec(box: Any) -> Any:
        spec, kernel = cls.get_partition_spec(box), box.value
        if not is_scaled(kernel):
            return spec
        own = (name if n > 1 else None for name, n in zip(spec, kernel.scale.shape, strict=True))
        return ScaledArray(spec, PartitionSpec(*own))

    def get_sharding(box: Any, mesh: Any) -> Any:
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        specs = get_partition_spec(box)
        return jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    def unbox(box: Any, apply_constraint: bool = True) -> Any:
        """Without a constraint: codes, scale and slot of a kernel have shapes of their own."""
        del apply_constraint
        return box.value

    members = {"plain": cls, "get_partition_spec": get_partition_spec, "get_sharding": get_sharding}
    members["unbox"] = unbox
    return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(members))
