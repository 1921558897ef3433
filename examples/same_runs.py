"""Tables and pictures of runs that should be equal, for torch_same_recipe.py."""

import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import output

# Pairs of runs that should be equal. The second pair differs only by rounding: it is the reference.
PAIRS = (("torch", "JAX"), ("torch", "reversed"), ("torch>JAX", "torch"), ("JAX>torch", "JAX"))


@dataclasses.dataclass
class Run:
    """A run."""

    side: Any  # has step, evaluate, bytes, skipped
    see: Callable[[np.ndarray], np.ndarray] = lambda batch: batch
    losses: dict[int, float] = dataclasses.field(default_factory=dict)  # by step, the first is 1
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: float = float("nan")

    @property
    def milliseconds(self) -> float:
        """The median time of a step."""
        return 1e3 * statistics.median(self.seconds)

    def advance(self, batches: dict[int, np.ndarray]) -> None:
        """Trains on batches, by step."""
        for step, batch in batches.items():
            begun = time.perf_counter()
            self.losses[step] = self.side.step(self.see(batch))
            self.seconds.append(time.perf_counter() - begun)


def loss_rows(runs: dict[str, Run], ends: Collection[int]) -> output.Rows:
    """Means over the steps since the row before, of losses and, after "|", of distances step by step."""
    pairs = {f"|{a} - {b}|": distances(runs[a], runs[b]) for a, b in PAIRS if a in runs}
    columns = {name: (run.losses, ".4f") for name, run in runs.items()}
    columns |= {name: (apart, ".1e") for name, apart in pairs.items()}
    rows = []
    for first, last in itertools.pairwise([0, *sorted(ends)]):
        row: dict[str, Any] = {"step": last}
        for name, (numbers, places) in columns.items():
            found = [numbers[step] for step in range(first + 1, last + 1) if step in numbers]
            row[name] = format(statistics.mean(found), places) if found else None
        rows.append(row)
    return rows


def run_rows(runs: dict[str, Run]) -> output.Rows:
    """The final loss and the costs of each run; bytes are per parameter, ms the median of a step."""
    rows = []
    for name, run in runs.items():
        bytes_of = run.side.bytes()
        sizes = {key: f"{size:.2f}" for key, size in (bytes_of._asdict() | {"sum": sum(bytes_of)}).items()}
        speed = {"ms/step": f"{run.milliseconds:.1f}", "skipped": run.side.skipped}
        rows.append({"run": name, "validation loss": f"{run.validation:.4f}", **sizes, **speed})
    return rows


def distances(run: Run, other: Run) -> dict[int, float]:
    """The distance of the losses, by step, where both runs have one."""
    return {step: abs(loss - other.losses[step]) for step, loss in run.losses.items() if step in other.losses}


def draw(runs: dict[str, Run], title: str, cross: int, path: pathlib.Path) -> None:
    """Losses above, smoothed over a fiftieth of the run; distances below; a line where the sides changed."""
    from matplotlib.figure import Figure

    above, below = (figure := Figure(figsize=(8, 7), dpi=110)).subplots(2, sharex=True)
    width = max(len(runs["torch"].losses) // 50, 1)
    for name, run in runs.items():
        if name != "reversed":
            smooth = np.convolve(list(run.losses.values()), np.ones(width) / width, "valid")
            steps = np.array(list(run.losses))[width - 1 :]
            above.plot(steps, smooth, label=name, linewidth=1, linestyle="--" if ">" in name else "-")
    for name, other in PAIRS:
        if name in runs:
            far = distances(runs[name], runs[other])
            far = {step: max(distance, 1e-8) for step, distance in far.items()}  # zero has no logarithm
            below.plot(list(far), list(far.values()), label=f"|{name} - {other}|", linewidth=0.8)
    for axes in (above, below):
        if cross:
            axes.axvline(cross, color="gray", linewidth=0.8, linestyle=":")
        axes.legend(fontsize="small")
    above.set(ylabel="training loss", title=title)
    below.set(xlabel="step", ylabel="distance of losses", yscale="log")
    figure.savefig(path, bbox_inches="tight")
