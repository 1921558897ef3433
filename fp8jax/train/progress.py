"""How a run looks while it runs: one live bar per model, or plain lines where nobody can see a bar.

with Progress({"O2": curves, "bf16": other}, steps=1000, amount=768) as progress:
    for begin, end in spans(0, 1000, 10, 250):
        ...
        progress.show()
    progress.say("a line above the bars")
"""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fp8jax.train.extras import need
from fp8jax.train.observe import Curves

SECONDS_BETWEEN_LINES = 10.0  # where the output is a file or a pipe


def spans(start: int, stop: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """Cuts the steps from `start` to `stop` at every multiple of an interval."""
    while start < stop:
        end = min(stop, *((start // interval + 1) * interval for interval in intervals))
        yield start, end
        start = end


class Progress:
    """A context manager around a training loop.

    Args:
        curves: name -> what the model did so far; read at every `show`.
        steps: optimizer steps of the whole run.
        amount: what a step of one model sees: so many
        unit: of these.
    """

    def __init__(self, curves: Mapping[str, Curves], steps: int, amount: int, unit: str = "tokens"):
        self.curves, self.steps, self.amount, self.unit = curves, steps, amount, unit
        self.is_live = sys.stdout.isatty()
        self.line_is_due = time.monotonic()
        self.begun_at = time.monotonic()
        self.begun_with = self._done()
        self.last = {name: (len(c.loss), c.seconds) for name, c in curves.items()}

    def __enter__(self) -> "Progress":
        if self.is_live:
            self.bars = self._make_bars()
            self.tasks = {
                name: self.bars.add_task(name, total=self.steps, loss="", speed="", eta="")
                for name in self.curves
            }
            self.bars.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.is_live:
            self.bars.stop()

    def show(self) -> None:
        """Brings the display up to date."""
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

    def say(self, text: str) -> None:
        """Prints a line, above the bars if there are any."""
        if self.is_live:
            self.bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _make_bars(self) -> Any:
        rich = need("rich.progress")
        return rich.Progress(
            rich.TextColumn("{task.description:>6}"),
            rich.BarColumn(bar_width=16),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[loss]}"),
            rich.TextColumn("{task.fields[speed]}"),
            rich.TextColumn("{task.fields[eta]}"),
        )

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
        """Time left, judged by the time since the display began."""
        done = self._done() - self.begun_with
        if done <= 0:
            return ""
        left = (self.steps - self._done()) * (time.monotonic() - self.begun_at) / done
        return f"eta {int(left) // 60}:{int(left) % 60:02d}"
