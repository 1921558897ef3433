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

from fp8jax.extras import need
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
        rich = need("rich.progress")
        self.curves, self.steps, self.amount, self.unit = curves, steps, amount, unit
        self.line_is_due = time.monotonic()
        self.last = {name: (len(one.loss), one.seconds) for name, one in curves.items()}
        columns = rich.TextColumn("{task.description:>6}"), rich.BarColumn(bar_width=16)
        columns += (
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[text]}"),
            rich.TimeRemainingColumn(),
        )
        self.bars = rich.Progress(*columns, speed_estimate_period=3600)
        for name, one in curves.items():
            self.bars.add_task(name, total=steps, completed=len(one.loss), text="")
        self.is_live = sys.stdout.isatty()

    def __enter__(self) -> "Progress":
        if self.is_live:
            self.bars.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.is_live:
            self.bars.stop()

    def show(self) -> None:
        """Updates the display."""
        for task, (name, curves) in zip(self.bars.tasks, self.curves.items(), strict=True):
            self.bars.update(task.id, completed=len(curves.loss), text=self._text(name, curves))
        if not self.is_live and (time.monotonic() >= self.line_is_due or self._done() == self.steps):
            self.line_is_due = time.monotonic() + SECONDS_BETWEEN_LINES
            models = " | ".join(f"{task.description}: {task.fields['text']}" for task in self.bars.tasks)
            left = [int(task.time_remaining) for task in self.bars.tasks if task.time_remaining is not None]
            eta = f"  eta {max(left) // 60}:{max(left) % 60:02d}" if left else ""
            print(f"step {self._done()}/{self.steps}  {models}{eta}", flush=True)

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
