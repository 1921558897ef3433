"""The report: for each layer, whether it runs in FP8, and the reason if not."""

import re
from typing import Any, NamedTuple

import jax

# Prefix of a layer's named scope, see `scope`.
_SCOPE = "fp8jax:"


class Row(NamedTuple):
    """One layer."""

    path: str  # as in "params", joined by "/"
    kind: str  # the layer's class
    kernel_shape: tuple[int, ...]  # shape in one layer of a scan; () without a kernel
    fp8: bool
    reason: str  # why the layer does not run in FP8; empty if it does
    flops: int = 0  # of its matmuls in one forward pass: two per multiplication
    lora: int = 0  # rank of its adapters; 0 without adapters
    gemm: tuple[int, int, int] | None = (
        None  # rows, inputs and outputs of its first matmul; of one block for experts
    )


class Report(NamedTuple):
    """The layers of a model, in the order of their first call; `str` gives a table."""

    recipe: str
    rows: tuple[Row, ...]
    flops: int  # of all matmuls in one forward pass, including those of activations
    note: str = ""

    @property
    def fp8_share(self) -> float:
        """The share of matmul FLOPs in FP8."""
        return sum(row.flops for row in self.rows if row.fp8) / max(self.flops, 1)

    def largest(self, count: int) -> list[Row]:
        """The `count` layers with the most FLOPs that do not run in FP8."""
        rows = [row for row in self.rows if not row.fp8]
        return sorted(rows, key=lambda row: -row.flops)[:count]

    def __str__(self) -> str:
        def share(flops: int) -> str:
            return f"{100 * flops / max(self.flops, 1):.1f}%"

        cells = [("layer", "kind", "kernel", "FLOPs", "FP8")]
        for row in self.rows:
            shape = "x".join(map(str, row.kernel_shape))
            cells.append(
                (
                    row.path or "(root)",
                    row.kind,
                    shape,
                    share(row.flops),
                    ("yes" if row.fp8 else row.reason)
                    + (f", adapters of rank {row.lora}" if row.lora else ""),
                )
            )
        others = self.flops - sum(row.flops for row in self.rows)
        if others > 0:
            cells.append(("(no layer's)", "", "", share(others), "products of activations stay as they are"))
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in cells
        ]
        count = sum(row.fp8 for row in self.rows)
        summary = f"{self.recipe}: {count} of {len(self.rows)} layers in FP8, "
        summary += f"{100 * self.fp8_share:.0f}% of the FLOPs of products"
        return "\n".join([summary, *lines, *([self.note] if self.note else [])])


def scope(path: str) -> Any:
    """A named scope that assigns operations to the layer at `path`."""
    return jax.named_scope(_SCOPE + path.replace("/", "."))


def layer_of(name: str) -> str | None:
    """The layer of an operation, from the `scope` in the operation's name, with "." for "/" in its path; None
    without a layer."""
    found = re.findall(rf"{_SCOPE}([^/()]*)", name)
    return found[-1] if found else None
