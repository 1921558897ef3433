"""Calls that XLA does not look into, split over devices.

    units = {"m": 128, "n": 128, "k": 128}
    out = split_by_devices(kernel, "b m k, b n k -> b m n", units, summed="k")(lhs, rhs)

XLA gathers the operands of a Pallas kernel, and runs the whole kernel on each device. This gives it a rule:
each device runs the kernel on its shards.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


def split_by_devices(
    function: Callable[..., Any], rule: str, units: Mapping[str, int], summed: str = ""
) -> Callable[..., Any]:
    """`function`, which `jax.jit` splits over devices by a rule, and `jax.vmap` over a dim of its own.

    Args:
        function: maps arrays to an array or a tuple of arrays.
        rule: a letter for each dim, operands before "->" and outputs after it. A dim may be another one's
            number of blocks and has its letter. Letter b, the first of each, are independent calls.
        units: for a letter, the size that a shard is a multiple of. An operand with other shards is gathered
            along this dim.
        summed: a letter of operands only: outputs are sums over it, by an all-reduce if it is split.
    """
    operands, outputs = ([one.split() for one in side.split(",")] for side in rule.split("->"))

    def partition(mesh: Any, args: Any, out: Any) -> Any:
        axes = _axes(mesh, operands, args, units, summed)

        def sharding(dims: list[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in dims)))

        def on_shards(*shards: Any) -> Any:
            parts = function(*shards)
            return lax.psum(parts, axes[summed]) if summed in axes else parts

        of_outputs = jax.tree.unflatten(jax.tree.structure(out), map(sharding, outputs))
        return mesh, on_shards, of_outputs, tuple(map(sharding, operands))

    split = custom_partitioning(lambda *args: function(*args))  # it takes no default arguments
    split.def_partition(partition, sharding_rule=rule)
    mapped = jax.custom_batching.custom_vmap(split)

    @mapped.def_vmap
    def _(size: int, is_mapped: Any, *args: jax.Array) -> Any:
        pairs = zip(args, is_mapped, strict=True)
        args = tuple(x if mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, mapped in pairs)
        again = split_by_devices(function, rule, units, summed)
        out = again(*(x.reshape(-1, *x.shape[2:]) for x in args))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _axes(
    mesh: Any, operands: list[list[str]], args: Any, units: Mapping[str, int], summed: str
) -> dict[str, Any]:
    """The mesh axes of each split letter; no axis twice, letters of the first operand first."""
    found: dict[str, list[Any]] = {}
    sizes: dict[str, int] = {}
    for dims, arg in zip(operands, args, strict=True):
        # In a `jax.shard_map` over some of the mesh's axes, JAX names no other axes: the operand is gathered.
        spec = getattr(arg.sharding, "spec", (None,) * len(arg.shape))
        for dim, axes, size in zip(dims, spec, arg.shape, strict=True):
            names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
            found.setdefault(dim, []).append(names)
            sizes[dim] = max(size, sizes.get(dim, 0))
    axes, used = {}, set()
    # An operand is gathered along a summed dim unless both are split alike.
    for dim in sorted(found, key=lambda dim: dim == summed):
        choices = found[dim]
        names = next(filter(None, choices), ())
        count = math.prod(mesh.shape[name] for name in names)
        is_alike = dim != summed or all(each == names for each in choices)
        if names and is_alike and not used & set(names) and sizes[dim] % (units.get(dim, 1) * count) == 0:
            axes[dim], used = names, used | set(names)
    return axes
