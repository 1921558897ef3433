"""The chart as text, data and a picture."""

import os
from typing import Any

from fp8jax.extras import need
from fp8jax.inspect.chart.readers import bits_of
from fp8jax.inspect.chart.rows import HEADINGS, Cell, ChartRow
from fp8jax.inspect.tables import align


def table(rows: list[ChartRow]) -> str:
    """The measured chart as text; a cell that differs from its declaration shows both."""
    lines = [[row.recipe, *map(str, row.cells.values()), row.backend] for row in rows]
    return align([["recipe", *HEADINGS.values(), "backend"], *lines])


def text(rows: list[ChartRow], *, evidence: bool = False) -> str:
    """The chart, and on demand the arrays and operations behind each cell."""
    lines = [table(rows), "", _title(rows)]
    for row in rows if evidence else ():
        lines.append(row.recipe)
        for heading, cell in zip(HEADINGS.values(), row.cells.values(), strict=True):
            lines.append(f"  {heading:16} {cell.formats:12} {cell.evidence}")
    return "\n".join(lines)


def _title(rows: list[ChartRow]) -> str:
    where = f"read from a train step compiled for {rows[0].devices}"
    return f"{where}; residuals from the jaxpr of scanned layers"


def as_data(rows: list[ChartRow]) -> list[dict[str, Any]]:
    """The chart for JSON."""
    return [
        {"recipe": row.recipe, "backend": row.backend}
        | {column: cell._asdict() for column, cell in row.cells.items()}
        for row in rows
    ]


def new_figure(**size: Any) -> Any:
    """A figure of matplotlib; ImportError without it."""
    return need("matplotlib.figure").Figure(**size)


def picture(rows: list[ChartRow], path: str | os.PathLike[str]) -> None:
    """Draws the chart; a cell that differs from its declaration is red. Needs the `train` extra."""
    figure = new_figure(figsize=(9, 0.4 * len(rows) + 1), dpi=150)
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(_title(rows), fontsize=10)
    drawn = axes.table(
        [list(map(str, row.cells.values())) for row in rows],
        rowLabels=[row.recipe for row in rows],
        colLabels=list(HEADINGS.values()),
        cellColours=[list(map(_color, row.cells.values())) for row in rows],
        loc="center",
        cellLoc="center",
    )
    drawn.scale(1, 1.4)
    figure.savefig(path, bbox_inches="tight")


def _color(cell: Cell) -> str:
    """Red for a difference, else blue, darker for fewer bits."""
    if cell.differs:
        return "#e34948"
    bits = max(map(bits_of, cell.formats.split(" + ")))
    return {8: "#9ec5f4", 16: "#cfe3fb"}.get(bits, "#ffffff")
