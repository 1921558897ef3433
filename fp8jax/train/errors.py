"""Errors of the user's input, and packages of the extra `train`.

with blame_input():
    config = TrainConfig(**config.read(TrainConfig))    # a ValueError becomes `BadInput`, on one line
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from fp8jax import extras


class BadInput(ValueError):
    """The input does not describe a valid run. The message is one line that says what to change."""


class Diverged(BadInput):
    """A run stopped because its numbers were not finite; its report says so, too."""


@contextlib.contextmanager
def blame_input() -> Iterator[None]:
    """Turns a ValueError, and an ImportError about an extra, into `BadInput`."""
    try:
        yield
    except (ImportError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from error


def need(module: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        ImportError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"not installed: {module}; {extras.install('train')}") from None
