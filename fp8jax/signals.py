"""SIGINT (Ctrl-C) and SIGTERM: a run is stopped and saved, or its program ends at once.

    with ends_program("train_gpt: interrupted"):   # Ctrl-C ends the process with status 130
        with stop_requests() as requests:          # it is noted, too
            compile()
            with requests.deferred():              # now it only asks the loop to stop
                while not requests.asked():
                    step()

JAX runs Python code where an exception is lost, such as a callback of the garbage collector. So a handler
that only raises KeyboardInterrupt may do nothing, and a process that unwinds from JAX's code may crash.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # exit status, as a shell gives it
# A launcher hands on the Ctrl-C that the terminal also gave to its children.
SECONDS_OF_ONE_REQUEST = 1.0


class StopRequests:
    """Signals that ask a training loop to stop.

    Outside of `deferred` a SIGINT is noted and then handled as before, and a SIGTERM only as before. Inside,
    both are noted; a second SIGINT, later than `SECONDS_OF_ONE_REQUEST`, is handled as before.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # signal and time
        self._is_deferred = False
        self._before: dict[int, Any] = {}

    def asked(self) -> int:
        """The first signal that arrived in this process; 0 if none did."""
        return self._first[0] if self._first else 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In this block a signal only asks to stop."""
        self._is_deferred = True
        try:
            with self.receives(signal.SIGTERM):
                yield
        finally:
            self._is_deferred = False

    @contextlib.contextmanager
    def receives(self, number: int) -> Iterator[None]:
        """Receives a signal, unless this process ignores it or this thread is not the main one."""
        with _handled(number, self._receive) as before:
            self._before[number] = before
            yield

    def _receive(self, number: int, frame: Any) -> None:
        now, is_second = time.monotonic(), False
        if self._first is None:
            self._first = number, now
        else:
            is_second = number == signal.SIGINT and now - self._first[1] > SECONDS_OF_ONE_REQUEST
        if self._is_deferred and not is_second:
            return
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Notes SIGINT in the block, see `StopRequests`. Outside of the main thread nothing asks to stop."""
    requests = StopRequests()
    with requests.receives(signal.SIGINT):
        yield requests


@contextlib.contextmanager
def ends_program(line: str) -> Iterator[None]:
    """In this block SIGINT prints a line and ends this process with status 130, wherever it is."""

    def end(number: int, frame: Any) -> None:
        # Not by `print`, which may be what the signal interrupted. A live display hides the cursor.
        start = "\r\033[K\033[?25h" if os.isatty(2) else ""
        os.write(2, f"{start}{line}\n".encode())
        os._exit(INTERRUPTED)

    with _handled(signal.SIGINT, end):
        yield


@contextlib.contextmanager
def _handled(number: int, handler: Callable[[int, Any], None]) -> Iterator[Any]:
    """Has a signal handled in the block, unless the process ignores it or this is not the main thread.

    Gives the handler that was there before.
    """
    before = signal.getsignal(number)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):  # None: a handler that is not Python's
        yield before
        return
    signal.signal(number, handler)
    try:
        yield before
    finally:
        signal.signal(number, before)
