"""The settings of a section, and its notes.

    notes.table("16384", rows)          # rows of a table, as in output.py
    notes.figure("layer, te", 1.72)     # a number that a target is about
    notes.skip("qwix", "not installed") # what was not measured, and why

Notes are on disk after every addition, so a section that is killed leaves its results.
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

KINDS = ("tables", "figures", "skipped", "curves", "errors", "state")


class Given(NamedTuple):
    """Settings of a section."""

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
        """The most that are timed."""
        return 2 if self.tiny else 30

    @property
    def attention(self) -> str:
        """The implementation of attention, the same for all ways."""
        return "cudnn" if self.device == "gpu" else "xla"


class Notes:
    """Results of a section, kept in a JSON file."""

    def __init__(self, path: pathlib.Path, *, resume: bool = False) -> None:
        self.path = path
        self.found: dict[str, Any] = {name: {} for name in KINDS}
        if resume and path.exists():
            self.found = json.loads(path.read_text())
        self._write()

    def table(self, title: str, rows: Rows) -> None:
        """Keeps rows, instead of those under this title before."""
        if rows:
            self.add("tables", title, rows)

    def figure(self, name: str, value: float | None) -> None:
        """Keeps a number under the name that record.py's targets have, if it was measured."""
        if value is not None:
            self.add("figures", name, value)

    def skip(self, what: str, reason: str) -> None:
        """Keeps why something was not measured."""
        self.add("skipped", what, reason)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keeps an error inside, and goes on after it."""
        try:
            yield
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            self.add("errors", what, traceback.format_exc())
            self.skip(what, f"failed: {type(error).__name__}: {first[:200]}")

    def compile_all(self, compiles: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
        """The compiled programs by name, compiled side by side; a failure is noted and left out."""
        done = {}
        with concurrent.futures.ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 1) // 2))) as pool:
            futures = {name: pool.submit(compile_one) for name, compile_one in compiles.items()}
        for name, future in futures.items():
            with self.attempt(f"compiling {name if isinstance(name, str) else ' '.join(name)}"):
                done[name] = future.result()
        return done

    def add(self, kind: str, name: str, value: Any) -> None:
        """Keeps a value of one of the `KINDS`: curves are for the picture, the state is the GPU's."""
        self.found[kind][name] = value
        self._write()

    def _write(self) -> None:
        # Written aside and moved: a reader never sees half of it.
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(self.found))
        os.replace(aside, self.path)
