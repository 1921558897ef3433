"""Errors of the user's input and of files.

with blame_input():
    config = TrainConfig(**config.read(TrainConfig))    # a ValueError becomes `BadInput`, on one line
"""

import contextlib
from collections.abc import Iterator


class BadInput(ValueError):
    """The input does not describe a valid run. The message is one line that says what to change."""


class Diverged(BadInput):
    """A run stopped because its numbers were not finite; its report says so, too."""


def unwritten(path: object, error: OSError) -> OSError:
    """The error of a run's file that cannot be written, with what to do."""
    remedy = "free space or give write permission, then resume the run"
    return OSError(f"{path} cannot be written ({error.strerror}); {remedy}")


@contextlib.contextmanager
def blame_input() -> Iterator[None]:
    """Turns a ValueError or an ImportError into `BadInput`, on one line."""
    try:
        yield
    except (ImportError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from error
