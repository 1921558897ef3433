"""Stopping in order: Ctrl-C asks, the loop finishes what it does, saves and leaves.

with requests() as stop_asked:
    for ...:
        if stop_asked():
            ...

Of many processes it is enough to ask one: all get the answer, so they all have to ask at the same place.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fp8jax.train import processes


@contextlib.contextmanager
def requests() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a question that a loop can ask; the second one interrupts at once.

    Outside of the main thread, where Python lets nobody handle signals, they do what they did before, and
    this process never asks to stop.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()

    def receive(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield lambda: processes.any_of(bool(received))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
