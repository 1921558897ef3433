"""Checks of a batch and of random keys, and a different key for each microbatch."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def fold_in(keys: Any, number: Any) -> Any:
    """`jax.random.fold_in` of every key in a tree; typed or raw, single keys or arrays of keys."""

    def fold(key: jax.Array) -> jax.Array:
        typed = key if _is_typed(key) else jax.random.wrap_key_data(key)
        new = jax.vmap(lambda each: jax.random.fold_in(each, number))(typed.reshape(-1)).reshape(typed.shape)
        return new if _is_typed(key) else jax.random.key_data(new)

    return jax.tree.map(fold, keys)


def names_of(keys: Any) -> tuple[str, ...] | None:
    """The argument `keys` of `accumulate_gradients` as a tuple.

    Raises:
        TypeError: `keys` is neither a name nor a sequence of names.
    """
    if keys is None:
        return None
    names = (keys,) if isinstance(keys, str) else keys
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f'`keys`: expected names of keyword arguments, as keys="key"; got {keys!r}.')
    return tuple(names)


def check_named(names: tuple[str, ...] | None, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if a name is not a random key's, or if `names` is None and there are keys."""
    if names is None:
        for name, value in kwargs.items():
            if any(_is_typed(x) or _is_raw(x) for x in jax.tree.leaves(value)):
                raise ValueError(
                    f"`keys`: expected the names of random keys, and {name!r} holds a random key: pass "
                    f'keys="{name}" for a new key in each microbatch, or keys=() for the same key in all.'
                )
    for name in names or ():
        if name not in kwargs:
            raise ValueError(
                f"`keys`: expected names of keyword arguments of the call; {name!r} is none; got "
                f"{', '.join(kwargs) or 'no keyword arguments'}."
            )
        for leaf in jax.tree.leaves(kwargs[name]):
            if not (_is_typed(leaf) or _is_raw(leaf, stacked=True)):
                raise ValueError(f"`keys`: expected random keys in {name!r}; got {shown(leaf)}.")


def check_batch(args: Any, parts: int, of: str, advice: str) -> None:
    """Raises ValueError if positional arguments are random keys, or cannot be split along their first axis.

    Args:
        args: the arguments.
        parts: number of parts.
        of: what the parts are, for the message.
        advice: how to pass a random key, for the message.
    """
    leaves = jax.tree.leaves(args)
    for leaf in leaves:
        # A uint32 array of shape (2,) may be a batch of two rows, if all other arrays have two rows.
        is_one = parts > 1 and _is_raw(leaf) and any(jnp.shape(x)[:1] != leaf.shape for x in leaves)
        if is_one or (_is_typed(leaf) and not leaf.ndim):
            raise ValueError(
                f"`args`: expected arrays of a batch; got a random key {shown(leaf)}, which has no rows. "
                f"Give it as {advice}."
            )
    for leaf in leaves:
        shape = jnp.shape(leaf)
        if not shape or not shape[0] or shape[0] % parts:
            raise ValueError(
                f"`args`: expected arrays with a first axis divisible by {of} and not 0; got shape {shape}. "
                "Pass arguments that are not split as keyword arguments."
            )


def check_given(args: Any, kwargs: Any, parts: int) -> None:
    """Raises ValueError if there is nothing to split into parts: the loss has no other arguments."""
    if parts > 1 and not jax.tree.leaves((args, kwargs)):
        raise ValueError(
            "`args`: expected arrays of a batch after the variables; got none, and each of the "
            f"{parts} parts would compute all that `loss_fn` closes over. Pass the batch as positional "
            "arguments, which are split, and what all parts share as keyword arguments."
        )


def _is_typed(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_raw(x: Any, stacked: bool = False) -> bool:
    """Whether `x` looks like a raw key from `jax.random.PRNGKey`, or with `stacked` an array of raw keys."""
    shape = jax.eval_shape(jax.random.PRNGKey, 0).shape
    if getattr(x, "dtype", None) != jnp.uint32:
        return False
    return x.shape == shape or (stacked and x.shape[-1:] == shape)


def shown(x: Any) -> str:
    """A short description of an argument for an error message."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)
