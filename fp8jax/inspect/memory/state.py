"""Bytes that a training step keeps between calls, by kind.

bytes_by_kind(variables, opt_state, batch)  # {"weights": ..., "moments": ..., "master": ..., "inputs": ...}
"""

import math
from typing import Any

import jax

from fp8jax.optim.state import is_adam_state

_HOST = ("pinned_host", "unpinned_host")


def bytes_by_kind(variables: Any, opt_state: Any, batch: Any) -> dict[str, int]:
    """Bytes on one device of each kind of array: "weights", "moments", "master" or "inputs", as in `Plan`.

    Args:
        variables, opt_state, batch: arrays or `jax.ShapeDtypeStruct`s. An array with a sharding counts one
            device's shard, and nothing in the memory of an accelerator's host. The batch counts as "inputs".
    """
    arrays = [("weights", variables), ("inputs", batch)]
    for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state):
        if is_adam_state(node):
            arrays += [("moments", (node.adam.mu, node.adam.nu)), ("master", node.master)]
            arrays.append(("inputs", (node.adam.count, node.skipped)))
        else:
            arrays.append(("moments" if node.ndim else "inputs", node))
    found = {"weights": 0, "moments": 0, "master": 0, "inputs": 0}
    for kind, tree in arrays:
        found[kind] += sum(map(_bytes_on_one_device, jax.tree.leaves(tree)))
    return found


def _bytes_on_one_device(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and _is_on_host(sharding):
        return 0
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _is_on_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether an array is in the memory of an accelerator's host; a CPU has only one memory."""
    device = next(iter(sharding.device_set))
    return device.platform != "cpu" and sharding.memory_kind in _HOST
