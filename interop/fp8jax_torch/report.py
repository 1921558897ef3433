"""The report of a prepared model: which layers run in FP8, and why the others do not."""

from typing import NamedTuple

from fp8jax_torch.backends.base import Row


class Report(NamedTuple):
    """The modules with weights, in the model's order; `str` gives a table."""

    recipe: str
    why: str  # the backend, and the reason for its choice
    rows: tuple[Row, ...]
    note: str = ""

    def __str__(self) -> str:
        cells = [("layer", "kind", "weight", "FP8")]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            cells.append((row.path or "(root)", row.kind, shape, "yes" if row.fp8 else str(row.reason)))
        widths = [max(len(line[column]) for line in cells) for column in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]) for line in cells
        ]
        count = sum(row.fp8 for row in self.rows)
        summary = [f"{self.recipe}: {count} of {len(self.rows)} modules with weights in FP8", self.why]
        return "\n".join([*summary, *lines, *([self.note] if self.note else [])])
