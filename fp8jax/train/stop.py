"""Stopping in order: Ctrl-C asks, the loop finishes what it does, saves and leaves.

with requests() as stop_asked:
    for ...:
        if stop_asked():
            ...
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


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
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
