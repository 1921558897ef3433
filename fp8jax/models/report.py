"""Which layers run in FP8, which do not, and why: nothing falls back silently."""

import fnmatch
from typing import NamedTuple

from fp8jax.recipe import DEFAULT_EXCLUDE, Recipe


class Row(NamedTuple):
    """One layer."""

    path: str  # as in "params", joined by "/"
    kind: str  # the layer's class
    kernel_shape: tuple[int, ...]  # within one layer of a scan; () if it has no kernel
    fp8: bool
    reason: str  # why not; empty if it is


Rows = dict[str, Row]


class Report(NamedTuple):
    """The layers of a model, in the order of their first call; `str` is a table."""

    recipe: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        shapes = ["x".join(map(str, row.kernel_shape)) for row in self.rows]
        cells = [("layer", "kind", "kernel", "FP8")]
        for row, shape in zip(self.rows, shapes, strict=True):
            cells.append((row.path or "(root)", row.kind, shape, "yes" if row.fp8 else row.reason))
        widths = [max(len(line[column]) for line in cells) for column in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]) for line in cells
        ]
        count = sum(row.fp8 for row in self.rows)
        summary = f"{self.recipe}: {count} of {len(self.rows)} layers in FP8"
        return "\n".join([summary, *lines])


def matches(pattern: str, path: str) -> bool:
    """Shell-style: a pattern with "/" against the path, one without against the last name."""
    return fnmatch.fnmatchcase(path if "/" in pattern else path.rsplit("/", 1)[-1], pattern)


def why_not_chosen(recipe: Recipe, path: str) -> str | None:
    """None if the recipe's patterns choose the layer, else the rule that does not."""
    if not any(matches(pattern, path) for pattern in recipe.include):
        return f"not in include={'+'.join(recipe.include)}"
    for pattern in recipe.exclude:
        if matches(pattern, path):
            return f"exclude={pattern}"
    return None


def check_patterns(recipe: Recipe, rows: Rows) -> None:
    """Raises ValueError if a pattern that the user gave matches no layer."""
    given = [("include", p) for p in recipe.include]
    if recipe.exclude != DEFAULT_EXCLUDE:
        given += [("exclude", p) for p in recipe.exclude]
    layers = [row.path for row in rows.values() if row.kernel_shape]
    for name, pattern in given:
        if recipe.gemm == "FP8" and not any(matches(pattern, path) for path in layers):
            raise ValueError(
                f"recipe: the {name} pattern {pattern!r} matches no layer; the layers are "
                f"{', '.join(layers) or 'none'}."
            )
