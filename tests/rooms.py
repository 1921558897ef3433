"""The rooms of the package by rank: what test_layers.py reads, and a table and a picture drawn from it.

python tests/rooms.py          # writes the table of docs/architecture.md, and docs/images/rooms.svg
"""

import html
import itertools
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"


class Row(NamedTuple):
    """Rooms of one rank: root files and folders of `fp8jax/`."""

    rank: int
    rooms: tuple[str, ...]
    brief: str  # in the picture
    holds: str  # in the table


ROWS = (
    Row(
        0,
        ("formats.py",),
        "number formats",
        "number formats as data: E4M3, E5M2, E4M4, E8M0, E2M1, FP16, BF16, FP32",
    ),
    Row(0, ("variables.py",), "collections", "names of collections of variables"),
    Row(
        0,
        ("platforms.py", "signals.py", "extras.py"),
        "platforms, signals",
        "operations by platform, shardings; Ctrl-C and SIGTERM; optional packages",
    ),
    Row(
        1,
        ("recipe/",),
        "the chart",
        "`Recipe`, its presets and legal values; settings of Accelerate and TransformerEngine as recipes",
    ),
    Row(
        1,
        ("quantization/",),
        "casts, ScaledArray",
        "`ScaledArray(data, scale)`, `quantize`, casts, scales; the only place that rounds and saturates",
    ),
    Row(
        2,
        ("scaling/",),
        "scales of operands",
        "how a dot's operands are quantized for its GEMMs: by `tensor` (`delayed`, `current`) or by `block`; "
        "the merge of states",
    ),
    Row(2, ("loss_scale.py",), "of float16 losses", "scales of float16 losses"),
    Row(
        3,
        ("backends/",),
        "GEMMs",
        "what computes a GEMM: `xla`, `te/`, `pallas`, `cudnn` and `reference`, the entries of `BACKENDS`",
    ),
    Row(3, ("comm/",), "FP8 collectives, ZeRO", "FP8 collectives on one shared scale; what ZeRO shards"),
    Row(
        4,
        ("dot/",),
        "dots and their derivatives",
        "`dot_general`, `einsum`, `ragged_dot` and their custom derivatives; knows no mesh",
    ),
    Row(
        4,
        ("optim/",),
        "optax transformations",
        "optax transformations; one Adam: arithmetic, storages of moments, the fused update",
    ),
    Row(
        5,
        ("rewrite/",),
        "FP8 into a jaxpr",
        "FP8 into a jaxpr: follow parameters, choose recipes by rules, evaluate, report, LoRA, remat",
    ),
    Row(
        6,
        ("gradients/",),
        "value_and_grad, accumulation, apply_updates",
        "`value_and_grad`, accumulation, `apply_updates`",
    ),
    Row(
        7,
        ("adapters/",),
        "Linen, NNX, mixture of experts",
        "one interface for models of Linen, NNX and plain functions; mixture of experts",
    ),
    Row(
        8,
        ("inspect/",),
        "targets, compiled programs, chart, GEMMs, memory, statistics",
        "GPUs that are not here, compiled programs, chart, GEMMs, memory, devices; statistics of tensors",
    ),
    Row(
        8,
        ("checkpoints/",),
        "Hugging Face",
        "models in the names and files of Hugging Face",
    ),
    Row(
        9,
        ("train/",),
        "Trainer, fit, data, checkpoints, report",
        "`Trainer`, its configuration, data, checkpoints, report",
    ),
    Row(10, ("__init__.py",), "public names", "21 public names"),
    Row(11, ("cli/",), "the command", "the command `fp8jax`"),
)
RANKS = {name.removesuffix("/").removesuffix(".py"): row.rank for row in ROWS for name in row.rooms}

# By rank, from 0.
COLORS = (
    "#eeeeee #fbe9c8 #fbe9c8 #fbe9c8 #d9f0dd #d9f0dd #d9f0dd #f3dfee #e3ebfa #e3ebfa #e3ebfa #e3ebfa".split()
)
OUTSIDE = "| - | `interop/fp8jax_torch/` | the same `Recipe` on torch modules |"
HEAD = """<style>text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#1c2333}
.s{font-size:12px;fill:#3d4658}.g{fill:#8a93a6}.b{stroke:#5b6b8c;stroke-width:1.2}
.a{stroke:#8a93a6;stroke-width:1.6;fill:none;marker-end:url(#m)}</style>
<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#8a93a6"/></marker></defs>"""


def table() -> str:
    """The table of the page."""
    rows = [f"| {row.rank} | {', '.join(f'`{name}`' for name in row.rooms)} | {row.holds} |" for row in ROWS]
    return "\n".join(["| rank | room | holds |", "|---|---|---|", *rows, OUTSIDE, ""])


def page() -> str:
    """The page with its table."""
    return re.sub(r"(?m)^\| rank \|.*\n(\|.*\n)*", lambda _: table(), PAGE.read_text())


def picture() -> str:
    """The picture: a box for each rank, the highest at the top."""
    ranks = [(rank, list(rows)) for rank, rows in itertools.groupby(ROWS, lambda row: row.rank)]
    height = 50 * len(ranks) + 26
    title = "The rooms of the package, by rank"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" '
        f'role="img"><title>{title}</title>',
        HEAD,
    ]
    for number, (rank, rows) in enumerate(reversed(ranks)):
        y = 16 + 50 * number
        names = html.escape(" · ".join(name for row in rows for name in row.rooms))
        briefs = html.escape(" · ".join(row.brief for row in rows))
        lines += [
            f'<rect class="b" x="70" y="{y}" width="560" height="40" rx="7" fill="{COLORS[rank]}"/>',
            f'<text x="350" y="{y + 16}" text-anchor="middle">{names}</text>',
            f'<text x="350" y="{y + 34}" text-anchor="middle" class="s">{briefs}</text>',
            f'<text class="s g" x="40" y="{y + 25}" text-anchor="middle">{rank}</text>',
        ]
    lines += [
        f'<path class="a" d="M660 30 L660 {height - 21}"/>',
        f'<text class="s g" x="-{height // 2}" y="682" transform="rotate(-90)" text-anchor="middle">'
        "imports point down</text>",
        "</svg>",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURE.write_text(picture())
