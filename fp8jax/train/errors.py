"""What the user did wrong, told apart from what the program does wrong.

with blame_input():
    ...                   # a ValueError from here is about the input: one line, no traceback
"""

import contextlib
from collections.abc import Iterator


class BadInput(Exception):
    """The input does not make a run; the message is one line that says what is wrong and what to do."""


@contextlib.contextmanager
def blame_input() -> Iterator[None]:
    """Turns a ValueError, and an ImportError about an extra, into `BadInput`."""
    try:
        yield
    except (ImportError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from error
