"""The page of a run: every table and picture with an explanation for someone who did not write the program.

page(about, outcomes, rows, verdict, pictures)      # HTML with the pictures inside
"""

import base64
import html
import pathlib
import string
from collections.abc import Mapping
from typing import Any

from fp8jax.train.report import memory

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")

_SKIPPED = """A step is skipped if a gradient is infinite or not a number: weights, optimizer and scales stay
as they were, and training goes on. A few skipped steps at the beginning are normal while a loss scale is
being found. Many of them, or more and more, mean that the training diverges. They are marked at the lower
edge of the picture."""

_SATURATION = """Before an FP8 GEMM, each tensor is divided by its scale and rounded to 8 bits. The map shows,
per tensor and over time, the largest magnitude as a share of the largest magnitude that FP8 can represent.
White means that the range is used to its end. Blue means that the top of the range is unused, which costs
nothing until small values are lost at its bottom. Red means that values were larger than the scale expected
and were clipped. Delayed scales look back, so a little red while the model changes quickly is normal, and
lasting red is not. Each column is the largest of the steps that it stands for."""

_SCALES = """The scales of each layer's tensors, on a logarithmic axis: the value that the FP8 number 1 stands
for. A scale follows the largest magnitude of its tensor, so it is small for gradients and moves most at the
beginning. A scale that keeps growing is a sign of a layer that diverges."""

_LAYERS = """Each layer with the size of its weights and its share of the FLOPs of all GEMMs. "yes" means that
it runs in FP8; anything else is the reason why it does not."""


def page(
    about: Mapping[str, Any],
    outcomes: Mapping[str, Any],
    rows: list[list[str]],
    verdict: str,
    pictures: Mapping[str, bytes],
) -> str:
    """The page as one file.

    Args:
        about: "data", and the values under "Settings".
        outcomes: name -> `report.Outcome`; the first is the recipe.
        rows: the comparison, a heading first.
        verdict: a sentence or two.
        pictures: file name -> PNG.
    """
    recipe = next(iter(outcomes))
    layers = [
        f"<h2>Layers of {_text(name)}</h2>\n<p>{_LAYERS}</p>\n<pre>{_text(outcome.layers)}</pre>"
        for name, outcome in outcomes.items()
    ]
    memories = [memory.table(outcome.memory) for outcome in outcomes.values()]
    for name, table in zip(outcomes, memories, strict=True):
        table[0][0] = f"{name}: {table[0][0]}"
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        recipe=_text(recipe),
        steps=f"{len(outcomes[recipe].curves.loss):,}",
        data=_text(about["data"]),
        verdict=_text(verdict),
        results=_table(rows),
        losses=_source(pictures["losses.png"]),
        skipped=_text(_skipped(outcomes)),
        memory="\n".join(map(_table, memories)),
        scaling=_scaling(recipe, pictures),
        layers="\n".join(layers),
        settings=_table([["setting", "value"], *_flat(about)]),
    )


def _scaling(recipe: str, pictures: Mapping[str, bytes]) -> str:
    if "scales.png" not in pictures:
        return f"<h2>Scales</h2><p>{_text(recipe)} has no delayed scales.</p>"
    figures = [("Saturation of FP8", "saturation.png", _SATURATION), ("Scales", "scales.png", _SCALES)]
    return "\n".join(
        f'<h2>{title}</h2>\n<p>{text}</p>\n<img alt="{title}" src="{_source(pictures[name])}">'
        for title, name, text in figures
    )


def _skipped(outcomes: Mapping[str, Any]) -> str:
    """The skipped steps of each model."""
    found = []
    for name, outcome in outcomes.items():
        steps = outcome.curves.skipped
        if steps:
            listed = ", ".join(f"{step:,}" for step in steps[:10]) + (", ..." if len(steps) > 10 else "")
            found.append(f"{name} skipped {len(steps):,} of {len(outcome.curves.loss):,} steps: {listed}.")
    return " ".join([*found, _SKIPPED]) if found else "Skipped steps: none."


def _flat(about: Mapping[str, Any]) -> list[list[str]]:
    """Nested settings as rows."""
    found: list[list[str]] = []
    for key, value in about.items():
        found += _flat(value) if isinstance(value, Mapping) else [[key, str(value)]]
    return found


def _table(rows: list[list[str]]) -> str:
    lines = []
    for row in rows:
        tag = "td" if lines else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def _source(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _text(value: Any) -> str:
    return html.escape(str(value))
