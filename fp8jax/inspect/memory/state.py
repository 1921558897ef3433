"""Bytes that a training step keeps between steps, by kind.

bytes_by_kind(variables, opt_state, batch)  # {"weights": ..., "moments": ..., "master": ..., "inputs": ...}
"""

import math
from typing import Any

import jax

from fp8jax.optim.state import is_adam_state

_HOST = ("pinned_host", "unpinned_host")


def kinds_of(variables: Any, opt_state: Any) -> list[str]:
    """The kind of each array of a step's state: "weights", "moments", "master" or "inputs" as in `Plan`."""
    kinds = ["weights"] * len(jax.tree.leaves(variables))
    for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state):
        if is_adam_state(node):
            moments, masters = (len(jax.tree.leaves(x)) for x in ((node.adam.mu, node.adam.nu), node.master))
            # A counter in front, and one at the end.
            kinds += ["inputs", *["moments"] * moments, *["master"] * masters, "inputs"]
        else:
            kinds.append("moments" if node.ndim else "inputs")
    return kinds


def bytes_by_kind(variables: Any, opt_state: Any, batch: Any) -> dict[str, int]:
    """Bytes on one device of each kind of array; the batch counts as "inputs".

    Args:
        variables, opt_state, batch: arrays or `jax.ShapeDtypeStruct`s. An array with a sharding counts with
            one device's shard, an array in the memory of an accelerator's host with nothing.
    """
    found: dict[str, int] = {"weights": 0, "moments": 0, "master": 0, "inputs": 0}
    kinds = kinds_of(variables, opt_state) + ["inputs"] * len(jax.tree.leaves(batch))
    for kind, leaf in zip(kinds, jax.tree.leaves((variables, opt_state, batch)), strict=True):
        found[kind] += _bytes_on_one_device(leaf)
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
