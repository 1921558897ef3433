"""Tables as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def align(rows: Iterable[Iterable[str]], *, right: bool = False) -> str:
    """Lines with columns of equal width.

    Args:
        rows: the cells of each line; all lines have the same number of cells.
        right: whether columns after the first are aligned to the right.
    """
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if right and number else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def records(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under their common keys, numbers to the right."""
    return align([list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)], right=True)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
