"""The record of a run: result.json for programs, table.md for people, picture.png for a glance.

Written anew after every section, the picture at the end, so a run that is cut off leaves its results.
"""

import json
import pathlib
import shutil
import subprocess
from typing import Any, NamedTuple

import output


class Target(NamedTuple):
    """A figure that is judged."""

    what: str
    section: str
    figure: str
    at_least: float | None = None
    at_most: float | None = None


TARGETS = (
    Target("correctness: rows that did not hold", "correctness", "correctness", at_most=0),
    Target("FP8 GEMMs of a Dense step (cuBLASLt calls)", "correctness", "FP8 GEMMs of a Dense step", 3, 3),
    Target("FP8 GEMM 8192^3, speed / torch._scaled_mm", "gemm", "gemm", at_least=0.9),
    Target("transformer layer, te, speed / bf16", "layer", "layer delayed", at_least=1.7),
    Target("transformer layer, te,scaling=current, speed / bf16", "layer", "layer current", at_least=1.6),
    Target("transformer layer, slower of the two, speed / flax", "layer", "layer, flax /", at_least=1.0),
    Target("optimizer step, O2, time / float32 optax.adamw", "optimizer", "optimizer", at_most=0.6),
    Target("GPT-350M train step, O2, tokens/s / bf16", "GPT-350M", "train step speed", at_least=1.25),
    Target("GPT-350M train step, O2, peak memory / bf16", "GPT-350M", "train step memory", at_most=0.7),
    Target("GPT-124M, validation loss, O2 - bf16", "convergence", "convergence", at_most=0.01),
)

# Section, column, and title of a panel.
PANELS = (
    ("gemm", "TFLOP/s", "GEMM, TFLOP/s"),
    ("layer", "ms", "transformer layer, ms"),
    ("optimizer", "ms", "optimizer step, ms"),
    ("GPT-350M", "tokens/s", "GPT-350M, tokens/s"),
    ("GPT-350M", "planned GB", "GPT-350M, planned GB"),
)


class Record:
    """Results of a run so far."""

    def __init__(self, folder: pathlib.Path, environment: dict[str, Any], is_judged: bool) -> None:
        folder.mkdir(parents=True)
        self.folder, self.environment, self.is_judged = folder, environment, is_judged
        self.sections: dict[str, dict[str, Any]] = {}

    @property
    def targets(self) -> list[dict[str, Any]]:
        """The judged lines."""
        figures = {
            name: value for found in self.sections.values() for name, value in found["figures"].items()
        }
        why = {
            name: "; ".join(dict.fromkeys(found["skipped"].values())) for name, found in self.sections.items()
        }
        why = {name: reason or "the section ended without it" for name, reason in why.items()}
        return lines(figures, why, self.is_judged)

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Keeps a section's notes, and writes the files."""
        self.sections[name] = found
        self.write()

    def write(self) -> None:
        """result.json and table.md."""
        kept = {"environment": self.environment, "targets": self.targets, "sections": self.sections}
        (self.folder / "result.json").write_text(json.dumps(kept, indent=1) + "\n")
        (self.folder / "table.md").write_text(self.page())

    def page(self) -> str:
        """All tables, the targets first."""
        about = self.environment
        lines = [f"# fp8jax on {about['device']}, {about['date']}", ""]
        if not self.is_judged:
            lines += ["A dry run: it shows that everything runs, and its figures say nothing.", ""]
        lines += [f"`{about['command']}`", "", "## Targets", "", output.markdown(self.targets), ""]
        for name, found in self.sections.items():
            lines += [f"## {name}, {found['seconds']:.0f} s", ""]
            for title, rows in found["tables"].items():
                lines += [f"{title}:", "", output.markdown(rows), ""]
            lines += [f"- not measured: {what}: {reason}" for what, reason in found["skipped"].items()]
            lines += [f"- the GPU right after it: {state}" for state in found["state"].values() if state]
            lines += [""]
        rows = [{"what": what, "is": value} for what, value in about.items()]
        return "\n".join([*lines, "## Versions", "", output.markdown(rows), ""])

    def draw(self) -> str | None:
        """picture.png; returns why there is none."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            return f"no picture: {error}"
        figure = Figure(figsize=(15, 8), dpi=110, layout="constrained")
        *panels, last = figure.subplots(2, 3).flat
        for axes, (name, column, title) in zip(panels, PANELS, strict=True):
            tables = list(self.sections.get(name, {}).get("tables", {}).items())
            bars(axes, title, tables[0][1] if tables else [], column)
        curves(last, self.sections.get("convergence", {}).get("curves", {}))
        figure.savefig(self.folder / "picture.png")
        return None


def lines(figures: dict[str, float], why: dict[str, str], is_judged: bool = True) -> output.Rows:
    """One row per target.

    Args:
        figures: measured numbers, by name.
        why: by section, the reason for its missing figures.
        is_judged: whether the figures are a GPU's at full size.
    """
    rows = []
    for target in TARGETS:
        measured, low, high = figures.get(target.figure), target.at_least, target.at_most
        bound = f"<= {high:g}" if low is None else f">= {low:g}"
        bound = f"{low:g}" if low == high else bound
        if measured is None:
            verdict = f"not run: {why.get(target.section, 'the section was left out')}"
        elif not is_judged:
            verdict = "not judged: a dry run"
        else:
            is_held = (low is None or measured >= low) and (high is None or measured <= high)
            verdict = "held" if is_held else "missed"
        rows.append({"target": target.what, "bound": bound, "measured": measured, "verdict": verdict})
    return rows


def bars(axes: Any, title: str, rows: list[dict[str, Any]], column: str) -> None:
    """A column of a table."""
    values = [row[column] for row in reversed(rows)]
    axes.set_title(title if rows else f"{title}: not run")
    axes.barh([str(next(iter(row.values()))) for row in reversed(rows)], values, color="tab:blue")
    for at, value in enumerate(values):
        axes.text(value, at, f" {value:.4g}", va="center", fontsize=8)
    axes.margins(x=0.2)


def curves(axes: Any, found: dict[str, list[tuple[int, float]]]) -> None:
    """Losses over steps."""
    axes.set_title("GPT-124M, loss" if found else "GPT-124M, loss: not run")
    for name, points in found.items():
        style = "o-" if name.endswith("validation") else "-"
        axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1, markersize=3)
    if found:
        axes.set(xlabel="step")
        axes.legend()


def gpu(query: str) -> str:
    """The answer of nvidia-smi to a query of the first GPU; "" without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    return lines[0] if lines else ""


def free_folder(parent: pathlib.Path, name: str) -> pathlib.Path:
    """A folder that is not there yet: a second run of a day does not write over the first."""
    number = 1
    while (folder := parent / (name if number == 1 else f"{name}_{number}")).exists():
        number += 1
    return folder
