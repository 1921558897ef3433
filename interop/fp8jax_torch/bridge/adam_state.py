"""What is where in an optax state that has an Adam in it.

A state is known by the names of its fields, wherever in a chain it is:

    AdamState(adam=ScaleByAdamState(count, mu, nu), master, skipped)    # fp8jax.optim
    ScaleByAdamState(count, mu, nu)                                     # optax
"""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax_torch.bridge.trees import Key, Tree

# torch's names of a parameter's moments and optax's of the trees of them.
MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
MASTER = "master"


def adam_in(tree: Tree) -> tuple[Key, Key]:
    """The names of the one Adam in a state, and of fp8jax's link around it, the same if there is none."""
    found = {
        key[:i]
        for key in tree.leaves
        for i, name in enumerate(key)
        if name == "mu" and (*key[:i], "count") in tree.leaves
    }
    if len(found) != 1:
        raise ValueError(
            f"`like` or `state`: expected an optax state with one Adam (fields `mu`, `nu`, `count`); "
            f"got {len(found)}."
        )
    [adam] = found
    return adam, adam[:-1] if adam[-1:] == ("adam",) else adam


def entries(adam: Key, link: Key) -> dict[str, Key]:
    """torch's entries of a parameter's state, and where the trees of these are."""
    return {entry: (*adam, tree) for entry, tree in MOMENTS.items()} | {MASTER: (*link, MASTER)}


def counters(tree: Tree, adam: Key, link: Key, step: int, skipped: int) -> dict[Key, jax.Array]:
    """The counters of a state after so many steps taken and skipped."""
    numbers = {}
    for key in tree.leaves:
        if key == (*adam, "count"):
            numbers[key] = step
        elif key == (*link, "skipped"):
            numbers[key] = skipped
        elif key[-1] == "count" and not _is_below(key, adam):
            # A schedule's, which stands beside Adam in the chain and is not told what Adam skips.
            numbers[key] = step + skipped
    return {key: _number(tree.leaves[key], number) for key, number in numbers.items()}


def _is_below(key: Key, prefix: Key) -> bool:
    return key[: len(prefix)] == prefix


def _number(leaf: Any, number: int) -> jax.Array:
    return jnp.full(leaf.shape, number, leaf.dtype)
