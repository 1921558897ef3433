"""The display of a run while it trains: a live bar per model on a terminal, lines elsewhere.

with Progress({"O2": curves, "bf16": other}, steps=1000, amount=768) as progress:
    for begin, end in spans(0, 1000, 10, 250):
        ...
        progress.show()
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from fp8jax.train.errors import need
from fp8jax.train.metrics import Curves

SECONDS_BETWEEN_LINES = 10.0  # where the output is a file or a pipe


class Progress:
    """A context manager around a training loop.

    Args:
        curves: name -> metrics of a model so far; read at every `show`.
        steps: optimizer steps of the whole run.
        amount: rows or tokens of a step of one model.
        unit: "rows" or "tokens".
    """

    def __init__(self, curves: Mapping[str, Curves], steps: int, amount: int, unit: str = "tokens"):
        self.curves, self.steps, self.amount, self.unit = curves, steps, amount, unit
        self.is_live = sys.stdout.isatty()
        self.begun_at = self.line_is_due = time.monotonic()
        self.begun_with = self._done()
        self.last = {name: (len(one.loss), one.seconds) for name, one in curves.items()}

    def __enter__(self) -> "Progress":
        if self.is_live:
            rich = need("rich.progress")
            fields = [rich.TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "speed", "eta")]
            name, bar = rich.TextColumn("{task.description:>6}"), rich.BarColumn(bar_width=16)
            self.bars = rich.Progress(name, bar, rich.MofNCompleteColumn(), *fields)
            empty = {"loss": "", "speed": "", "eta": ""}
            self.tasks = {name: self.bars.add_task(name, total=self.steps, **empty) for name in self.curves}
            self.bars.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.is_live:
            self.bars.stop()

    def show(self) -> None:
        """Updates the display."""
        eta = self._eta()
        fields = {name: self._fields(name, curves) for name, curves in self.curves.items()}
        if self.is_live:
            for name, (loss, speed) in fields.items():
                done = len(self.curves[name].loss)
                self.bars.update(self.tasks[name], completed=done, loss=loss, speed=speed, eta=eta)
        elif time.monotonic() >= self.line_is_due or self._done() == self.steps:
            self.line_is_due = time.monotonic() + SECONDS_BETWEEN_LINES
            models = " | ".join(f"{name}: {loss}, {speed}" for name, (loss, speed) in fields.items())
            print(f"step {self._done()}/{self.steps}  {models}  {eta}", flush=True)

    def _done(self) -> int:
        return min(len(curves.loss) for curves in self.curves.values())

    def _fields(self, name: str, curves: Curves) -> tuple[str, str]:
        """The newest loss, and the speed since the last call."""
        if not curves.loss:
            return "", ""
        steps, seconds = len(curves.loss), curves.seconds
        old_steps, old_seconds = self.last[name]
        if seconds <= old_seconds:
            old_steps, old_seconds = 0, 0.0
        self.last[name] = (steps, seconds)
        speed = (steps - old_steps) * self.amount / max(seconds - old_seconds, 1e-9)
        validation = f" val {curves.validation[-1][1]:.3f}" if curves.validation else ""
        return f"loss {curves.loss[-1]:.3f}{validation}", f"{speed:,.0f} {self.unit}/s"

    def _eta(self) -> str:
        """Remaining time, estimated from the time since the display began."""
        done = self._done() - self.begun_with
        if done <= 0:
            return ""
        left = (self.steps - self._done()) * (time.monotonic() - self.begun_at) / done
        return f"eta {int(left) // 60}:{int(left) % 60:02d}"
