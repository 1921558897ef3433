"""Stopping in order: Ctrl-C asks, the loop finishes what it does, saves and leaves.

with requests() as stop_asked:
    for ...:
        if stop_asked():
            ...

Of many processes it is enough to ask one: all get the answer, so they all have to ask at the same place.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

from fp8jax.train import processes


@contextlib.contextmanager
def requests() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a question that a loop can ask; the second one interrupts at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: processes.any_of(bool(received))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
