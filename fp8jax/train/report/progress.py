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
        self.begun_at = self.line_is_due = time.monotonic()
        self.begun_with = self._done()
        self.last = {name: (len(one.loss), one.seconds) for name, one in curves.items()}
        self.bars: Any = None
        if sys.stdout.isatty():
            rich = need("rich.progress")
            name, text = rich.TextColumn("{task.description:>6}"), rich.TextColumn("{task.fields[text]}")
            self.bars = rich.Progress(name, rich.BarColumn(bar_width=16), rich.MofNCompleteColumn(), text)
            self.tasks = {name: self.bars.add_task(name, total=steps, text="") for name in curves}

    def __enter__(self) -> "Progress":
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.bars:
            self.bars.stop()

    def show(self) -> None:
        """Updates the display."""
        texts = {name: self._text(name, curves) for name, curves in self.curves.items()}
        if self.bars:
            for name, text in texts.items():
                done = len(self.curves[name].loss)
                self.bars.update(self.tasks[name], completed=done, text=f"{text} {self._eta()}")
        elif time.monotonic() >= self.line_is_due or self._done() == self.steps:
            self.line_is_due = time.monotonic() + SECONDS_BETWEEN_LINES
            models = " | ".join(f"{name}: {text}" for name, text in texts.items())
            print(f"step {self._done()}/{self.steps}  {models}  {self._eta()}", flush=True)

    def _done(self) -> int:
        return min(len(curves.loss) for curves in self.curves.values())

    def _text(self, name: str, curves: Curves) -> str:
        """The newest loss, and the speed since the last call."""
        if not curves.loss:
            return ""
        steps, seconds = len(curves.loss), curves.seconds
        old_steps, old_seconds = self.last[name]
        if seconds <= old_seconds:
            old_steps, old_seconds = 0, 0.0
        self.last[name] = (steps, seconds)
        speed = (steps - old_steps) * self.amount / max(seconds - old_seconds, 1e-9)
        validation = f" val {curves.validation[-1][1]:.3f}" if curves.validation else ""
        unchanged = f", {curves.unchanged[-1][1]:.0%} of weights unchanged" if curves.unchanged else ""
        return f"loss {curves.loss[-1]:.3f}{validation}, {speed:,.0f} {self.unit}/s{unchanged}"

    def _eta(self) -> str:
        """Remaining time, estimated from the time since the display began."""
        done = self._done() - self.begun_with
        if done <= 0:
            return ""
        left = (self.steps - self._done()) * (time.monotonic() - self.begun_at) / done
        return f"eta {int(left) // 60}:{int(left) % 60:02d}"
