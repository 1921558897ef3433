"""Seeds of random bits in scaling states.

A scaling that rounds stochastically has the entry `KEY` in its state:

    key    # shape=(2,), float32: a seed below 2**24, and the number of steps

A transformed model has a seed for each layer, from its path, and `fp8jax.value_and_grad` adds the number of
the device and of the microbatch, see `for_part`.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fp8jax.scaling.base import KEY, State

_SPREAD = np.uint32(0x9E3779B1)  # odd: seeds of consecutive numbers are far apart


def with_seeds(state: State, path: str) -> State:
    """The state with seeds for the layer at `path`, other ones for each of its stacked layers.

    Raises:
        ValueError: an entry with the key's name is no key.
    """
    if KEY not in state:
        return state
    *stacked, size = state[KEY].shape
    if size != 2:
        raise ValueError(
            f"scaling state: expected a seed and a number of steps, shape (2,), in the entry {KEY!r}; got "
            f"{size} numbers. Give an entry that is no seed another name."
        )
    seeds = np.arange(math.prod(stacked), dtype=np.uint32) * _SPREAD + zlib.crc32(path.encode())
    return {**state, KEY: state[KEY].at[..., 0].set((seeds % 2**24).astype(np.float32).reshape(stacked))}


def for_part(states: PyTree, number: Any) -> PyTree:
    """A tree of states for part `number` of a batch, a microbatch or a device's: with other random bits than
    part 0, whose bits are those of `states`."""

    def moved(path: Any, leaf: jax.Array) -> jax.Array:
        if not _is_key(path):
            return leaf
        seed = leaf[..., 0].astype(jnp.uint32) + jnp.asarray(number).astype(jnp.uint32) * _SPREAD
        return jnp.asarray(leaf).at[..., 0].set((seed % 2**24).astype(jnp.float32))

    return jax.tree.map_with_path(moved, states)


def of_whole(states: PyTree, old: PyTree) -> PyTree:
    """The states that a part of a batch leaves, with the seeds of the `old` ones."""
    return jax.tree.map_with_path(
        lambda path, new, old: new.at[..., 0].set(old[..., 0]) if _is_key(path) else new, states, old
    )


def _is_key(path: Any) -> bool:
    """Whether a leaf is a key: "key" in a dict of states, "kernel__fp8_key" in an NNX module."""
    names = [str(getattr(part, "key", getattr(part, "name", ""))) for part in path]
    return names[-1:] == [KEY] or any(name.endswith(f"__fp8_{KEY}") for name in names)
