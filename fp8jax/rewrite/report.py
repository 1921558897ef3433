"""Which layers run in FP8, which do not, and why: nothing falls back silently."""

import re
from typing import Any, NamedTuple

import jax

# Products of what stands under `scope(path)` are the layer's.
_SCOPE = "fp8jax:"


class Row(NamedTuple):
    """One layer."""

    path: str  # as in "params", joined by "/"
    kind: str  # the layer's class
    kernel_shape: tuple[int, ...]  # within one layer of a scan; () if it has no kernel
    fp8: bool
    reason: str  # why not; empty if it is
    flops: int = 0  # of its products in one forward pass: two for each multiplication
    lora: int = 0  # rank of its adapters; 0 if it has none
    gemm: tuple[int, int, int] | None = (
        None  # rows, inputs and outputs of its first product; of experts a block's
    )


class Report(NamedTuple):
    """The layers of a model, in the order of their first call; `str` is a table."""

    recipe: str
    rows: tuple[Row, ...]
    flops: int  # of all products in one forward pass, the layers' and others
    note: str = ""

    @property
    def fp8_share(self) -> float:
        """The part of all FLOPs of products that is in FP8."""
        return sum(row.flops for row in self.rows if row.fp8) / max(self.flops, 1)

    def largest(self, count: int) -> list[Row]:
        """The layers with most FLOPs that do not run in FP8."""
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
    """A context in which products count as those of the layer at `path`."""
    return jax.named_scope(_SCOPE + path.replace("/", "."))


def layer_of(name: str) -> str | None:
    """The layer in whose `scope` an operation of a program stands, by the operation's name; "/" in its path
    is ".". None if it is no layer's."""
    found = re.findall(rf"{_SCOPE}([^/()]*)", name)
    return found[-1] if found else None
