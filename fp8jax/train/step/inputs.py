"""Inputs of a step: its batch, the shapes of a model's calls in the loss, and their random streams.

`check_batch` compares a batch with the example that the step was compiled for, and `checked` checks that the
loss of a batch is a scalar. `Recording` records the shapes of a model's calls. `streams` are the random
streams of one call of a Linen model.
"""

import functools
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from fp8jax.gradients.keys import shown
from fp8jax.variables import PARAMS


def checked(loss: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A loss function that raises TypeError for a result that is no scalar; `name` is for the message."""

    @functools.wraps(loss)
    def scalar(model: Any, batch: Any) -> Any:
        out = loss(model, batch)
        if isinstance(out, float | int) or getattr(out, "shape", None) == ():
            return out
        raise TypeError(
            f"`{name}`: expected a scalar as its result, the mean over the rows of the batch; got "
            f"{jax.tree.map(shown, out)}. Return the mean alone; auxiliary outputs are not taken."
        )

    return scalar


def check_batch(expected: PyTree, batch: PyTree, per_device: int) -> None:
    """Raises ValueError if a batch is not like the expected one.

    Args:
        expected: arrays, or shapes and dtypes.
        batch: arrays, or shapes and dtypes.
        per_device: rows of `expected` for each device, for the message.
    """
    wanted, got = map(_described, (expected, batch))
    if wanted.keys() != got.keys():
        there, here = (reprlib.repr([name or "one array" for name in each]) for each in (wanted, got))
        raise ValueError(f"`batch`: expected arrays at {there}; got {here}.")
    names = [name for name in wanted if wanted[name] != got[name]]
    if names:
        others = f", and {len(names) - 1} more arrays differ" if len(names) > 1 else ""
        raise ValueError(
            f"`batch{names[0]}`: expected {wanted[names[0]]}, {per_device} rows for each device; "
            f"got {got[names[0]]}{others}."
        )


def _described(tree: PyTree) -> dict[str, str]:
    """The path of each leaf -> its dtype and shape, as float32[8,128], or its type if it is no array."""

    def text(leaf: Any) -> str:
        if not hasattr(leaf, "dtype"):
            return f"a {type(leaf).__name__}"
        shape = ",".join(map(str, np.shape(leaf)))
        return f"{_dtype(leaf)}[{shape}]"

    def is_leaf(node: Any) -> bool:
        """Also None, and lists of numbers, which are no arrays."""
        has_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(node))
        return node is None or (isinstance(node, list) and not has_arrays)

    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): text(leaf) for path, leaf in leaves}


def shapes_of(tree: PyTree) -> PyTree:
    """Shapes and dtypes, as arrays have them on a device: float32 for NumPy's float64.

    Raises:
        TypeError: a leaf of the tree, the `example` of a trainer, is no array.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                f"`example{jax.tree_util.keystr(path)}`: expected an array; got a {type(leaf).__name__}. "
                "Lists of numbers are no arrays: give np.asarray(...) of them."
            )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), _dtype(x)), tree)


def _dtype(x: Any) -> Any:
    if isinstance(x, jax.Array) or isinstance(x.dtype, np.dtype):
        return jax.dtypes.canonicalize_dtype(x.dtype)
    try:  # a tensor of torch
        return jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"`batch`: expected arrays that NumPy reads; got a {type(x).__name__} of {x.dtype}, which says: "
            f"{error}. Give NumPy's arrays."
        ) from error


def streams(key: PRNGKeyArray, number: int = 0) -> dict[str, PRNGKeyArray]:
    """The random streams of call `number` of a step.

    A stream that has no key here, such as a VAE's noise, is taken by Flax from `PARAMS`.
    """
    # Call 0 has the key itself, as in 0.1.0, so that its dropout masks are those of before.
    dropout = jax.random.fold_in(key, 2 * number) if number else key
    return {"dropout": dropout, PARAMS: jax.random.fold_in(key, 2 * number + 1)}


class Recording:
    """A module that records the shapes of its calls."""

    def __init__(self, module: Any, calls: list[Any]) -> None:
        self._module, self._calls = module, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        self._calls.append(call_shapes((args, kwargs)))
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def call_shapes(tree: PyTree) -> Any:
    """Shapes and dtypes in the place of JAX arrays, in the arguments of a call."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree
    )
