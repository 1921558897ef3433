"""The record of a run: result.json for programs, table.md for people, picture.png for a glance.

Written anew after every section, the picture at the end, so that a run which is cut off leaves what it had.
"""

import json
import pathlib
import shutil
import subprocess
from typing import Any

import output

from on_gpu import targets

# Section, column, and what the panel shows.
PANELS = (
    ("gemm", "TFLOP/s", "GEMM, TFLOP/s"),
    ("layer", "ms", "transformer layer, ms"),
    ("optimizer", "ms", "optimizer step, ms"),
    ("GPT-350M", "tokens/s", "GPT-350M, tokens/s"),
    ("GPT-350M", "planned GB", "GPT-350M, planned GB"),
)


class Record:
    """What is known of a run by now."""

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
        return targets.lines(figures, why, self.is_judged)

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
            lines += [f"- the GPU right after it: {found['gpu']}"] if found.get("gpu") else []
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
    """What nvidia-smi says to a query of the first GPU, "" where there is none."""
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
