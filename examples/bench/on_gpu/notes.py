"""What a section is given, and what it leaves behind.

    notes.table("16384", rows)          # rows of a table, as in output.py
    notes.figure("layer, te", 1.72)     # a number that a target is about
    notes.skip("qwix", "not installed") # what was not measured, and why

Notes are on disk after every addition, so that a section which is killed leaves what it had.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from output import Rows


class Given(NamedTuple):
    """What a section is told."""

    device: str  # "gpu" or "cpu"
    tiny: bool  # sizes that only show that it runs
    until: float  # `time.time()` at which it should be done
    data: str  # a text file, "" for the standard library's source
    batch: int | None = None  # sequences a step of a GPT, if it is to be another number

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.time()

    @property
    def rounds(self) -> int:
        """At most so many are timed."""
        return 2 if self.tiny else 30

    @property
    def attention(self) -> str:
        """The implementation of attention, the same for all ways."""
        return "cudnn" if self.device == "gpu" else "xla"


class Notes:
    """What a section found, kept in a JSON file."""

    def __init__(self, path: pathlib.Path, *, resume: bool = False) -> None:
        self.path = path
        self.found: dict[str, Any] = {"tables": {}, "figures": {}, "skipped": {}, "curves": {}, "errors": {}}
        if resume and path.exists():
            self.found = json.loads(path.read_text())
        self._write()

    def table(self, title: str, rows: Rows) -> None:
        """Keeps rows; those there were under this title go."""
        if rows:
            self._add("tables", title, rows)

    def figure(self, name: str, value: float | int) -> None:
        """Keeps one number under the name that targets.py knows."""
        self._add("figures", name, value)

    def curve(self, name: str, points: list[tuple[int, float]]) -> None:
        """Keeps a curve for the picture."""
        self._add("curves", name, points)

    def skip(self, what: str, reason: str) -> None:
        """Keeps why something was not measured."""
        self._add("skipped", what, reason)

    def error(self, what: str, text: str) -> None:
        """Keeps all that is known of a failure."""
        self._add("errors", what, text)

    def gpu(self, state: str) -> None:
        """Keeps clocks, power and temperature."""
        self.found["gpu"] = state
        self._write()

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keeps what goes wrong inside, and goes on after it."""
        try:
            yield
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            self.error(what, traceback.format_exc())
            self.skip(what, f"failed: {type(error).__name__}: {first[:200]}")

    def compile_all(self, compiles: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
        """What the functions compile, side by side, by name; a failure is noted and left out."""
        done = {}
        with concurrent.futures.ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 1) // 2))) as pool:
            futures = {name: pool.submit(compile_one) for name, compile_one in compiles.items()}
        for name, future in futures.items():
            with self.attempt(f"compiling {name if isinstance(name, str) else ' '.join(name)}"):
                done[name] = future.result()
        return done

    def _add(self, kind: str, name: str, value: Any) -> None:
        self.found[kind][name] = value
        self._write()

    def _write(self) -> None:
        # Written aside and moved: a reader never sees half of it.
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(self.found))
        os.replace(aside, self.path)
