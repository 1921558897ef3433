"""The calls of a model in a loss: their shapes, and a Linen model's random streams."""

from typing import Any

import jax
from jaxtyping import PRNGKeyArray, PyTree

from fp8jax.variables import PARAMS


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
        self._calls.append(shapes((args, kwargs)))
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def shapes(tree: PyTree) -> Any:
    """Shapes and dtypes in the place of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree
    )
