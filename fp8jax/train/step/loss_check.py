"""The check of a loss function's result: the mean over the rows, and nothing else."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fp8jax.gradients.keys import shown


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
