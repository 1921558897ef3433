"""Plans as text."""

from typing import Any

from fp8jax.inspect.memory.planner import Plan

PARTS = ("weights", "moments", "master", "inputs", "temporaries", "total", "sent")


def table(plans: list[Plan]) -> str:
    """A row for each plan, in GB, or in MB if they are small."""
    name, unit = ("GB", 1e9) if max(plan.total for plan in plans) >= 1e9 else ("MB", 1e6)
    rows = [
        {
            f"{name} on each device": plan.recipe,
            "ZeRO": plan.stage,
            "devices": plan.devices,
            **{part: getattr(plan, part) / unit for part in PARTS},
        }
        for plan in plans
    ]
    return text(rows)


def as_data(plans: list[Plan]) -> list[dict[str, Any]]:
    """The same in bytes, for JSON."""
    return [{**plan._asdict(), "total": plan.total} for plan in plans]


def text(rows: list[dict[str, Any]]) -> str:
    """Rows aligned under their keys, the first column to the left."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
