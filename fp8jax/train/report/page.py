"""The page of a run: every table and picture, explained for someone who did not write the program.

page(about, outcomes, tables, verdict, pictures)      # HTML with the pictures inside
"""

import base64
import html
import pathlib
import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8jax.quantization import UNSET
from fp8jax.train.metrics import ScaledTensor
from fp8jax.train.report.outcome import MemoryPart, Outcome

# A larger saturation is clipped; a smaller one is rounded to the largest number, like any number:
# half of the last bit of E5M2's largest number is 1/14 of it.
_CLIPPED = 1 + 1 / 14
_SPEED = "Speed and time are those of training steps, without compiling, validation and checkpoints."
_CPU = "A CPU computes FP8 GEMMs in float32, so its speed says nothing about a GPU."
_UNCOUNTED = "<p>Not measured: --statistics counts it every --eval-steps, in a recipe with FP8.</p>"
_WORST = 5  # tensors that tables name
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def page(
    about: Mapping[str, Any],
    outcomes: Mapping[str, Outcome],
    tables: Mapping[str, list[list[str]]],
    verdict: str,
    pictures: Mapping[str, bytes],
) -> str:
    """The page as one file.

    Args:
        about: "data", and the values under "Settings"; at the top "date", "seconds", "resumed after step" and
            "command" of those that are there.
        outcomes: name -> outcome; the first is the recipe.
        tables: section -> rows of the comparison, a heading first; "trained", "saved" and "wrong".
        verdict: a sentence or two.
        pictures: file name -> PNG.
    """
    recipe = next(iter(outcomes))
    sources = {
        name.removesuffix(".png"): f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        for name, picture in pictures.items()
    }
    notes = {"trained_note": "", "saved_note": f"<p class=note>{_SPEED}</p>"}
    if outcomes[recipe].is_of_cpu:
        notes = {"trained_note": f"<p class=note>{_SPEED} {_CPU}</p>", "saved_note": ""}
    scaling = f"<h3>Scales</h3><p>{html.escape(recipe)} has no delayed scales.</p>"
    return _fill(
        "page.html",
        recipe=html.escape(recipe),
        steps=f"{len(outcomes[recipe].curves.loss):,}",
        data=html.escape(str(about["data"])),
        occasion=_occasion(about),
        verdict=html.escape(verdict),
        machine=html.escape(_machine(about)),
        **{section: _table(rows) for section, rows in tables.items()},
        **notes,
        losses=sources["losses"],
        skipped=html.escape(_skipped(outcomes)),
        clipped=html.escape(_clipped(outcomes[recipe])),
        unscaled=html.escape(_unscaled(outcomes[recipe])),
        memory="\n".join(_table(memory_rows(name, outcome.memory)) for name, outcome in outcomes.items()),
        underflow=_table(underflow_rows(outcomes[recipe]))
        if outcomes[recipe].curves.underflow
        else _UNCOUNTED,
        scaling=_fill("scaling.html", worst=_table(saturation_rows(outcomes[recipe])), **sources)
        if "scales" in sources
        else scaling,
        layers=_layers(outcomes),
        settings=_table([["setting", "value"], *_flat(about)]),
    )


def memory_rows(name: str, parts: list[MemoryPart]) -> list[list[str]]:
    """The memory of a model as text, in the unit of the largest number."""
    largest = max((number for part in parts for number in part[1:] if number is not None), default=0)
    unit, size = next(((unit, size) for unit, size in _UNITS if largest >= size), ("bytes", 1))

    def text(number: int | None) -> str:
        return "" if number is None else f"{number / size:,.{0 if size == 1 else 2}f}"

    heading = [f"{name}: {unit} on one device", "arrays", "compiled"]
    return [heading, *([part.part, *map(text, part[1:])] for part in parts)]


def saturation_rows(outcome: Outcome) -> list[list[str]]:
    """The tensors with the largest saturation, the worst first."""
    values, steps = np.array(outcome.curves.saturations), outcome.curves.scale_steps
    largest = np.nan_to_num(values).max(axis=0)
    worst = np.argsort(-largest, kind="stable")[:_WORST]
    return [
        ["saturation: the worst tensors", "largest", "before step", "clipped, of all columns", "last"],
        *(
            [
                _name(outcome.tensors[i]),
                f"{largest[i]:.2f}",
                f"{steps[int(values[:, i].argmax())]:,}",
                f"{(values[:, i] > _CLIPPED).mean():.0%}",
                f"{values[-1, i]:.2f}",
            ]
            for i in worst
        ),
    ]


def underflow_rows(outcome: Outcome) -> list[list[str]]:
    """The tensors with the largest share of numbers that their cast rounded to zero, the worst first."""
    counted = outcome.curves.underflow
    names = dict.fromkeys(name for _, shares in counted for name in shares)
    lines = [(name, [(shares[name], step) for step, shares in counted if name in shares]) for name in names]
    worst = sorted(lines, key=lambda line: -max(line[1])[0])[:_WORST]
    return [
        ["underflow: the worst tensors", "first", "largest", "at step", "last"],
        *(
            [name, f"{found[0][0]:.1%}", f"{max(found)[0]:.1%}", f"{max(found)[1]:,}", f"{found[-1][0]:.1%}"]
            for name, found in worst
        ),
    ]


def _fill(template: str, **values: str) -> str:
    text = pathlib.Path(__file__).with_name(template).read_text(encoding="utf-8")
    return string.Template(text).substitute(values)


def _layers(outcomes: Mapping[str, Outcome]) -> str:
    """The layers of the recipe; those of its twin folded."""
    recipe, *twins = ((html.escape(name), html.escape(outcome.layers)) for name, outcome in outcomes.items())
    folded = [f"<details><summary>{name}</summary>\n<pre>{layers}</pre></details>" for name, layers in twins]
    return "\n".join([f"<pre>{recipe[1]}</pre>", *folded])


def _occasion(about: Mapping[str, Any]) -> str:
    """When the run was, how long it took, and its command."""
    parts = [html.escape(str(about["date"]))] if "date" in about else []
    if "seconds" in about:
        minutes, seconds = divmod(round(about["seconds"]), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} h from start to end")
    if about.get("resumed after step"):
        parts[-1] += f", resumed after step {about['resumed after step']:,}"
    if "command" in about:
        parts.append(f"<code>{html.escape(about['command'])}</code>")
    return "; ".join(parts)


def _machine(about: Mapping[str, Any]) -> str:
    """The device and the versions of the run."""
    versions = about.get("versions", {})
    parts = [about.get("device"), *(f"{name} {version}" for name, version in versions.items())]
    return "On " + ", ".join(str(part) for part in parts if part) + "."


def _clipped(outcome: Outcome) -> str:
    """How many tensors were clipped, and which one the most."""
    values = np.array(outcome.curves.saturations)
    if not values.size:
        return "Clipped casts: not counted without delayed scales."
    if not (clipped := values > _CLIPPED).any():
        return "Clipped casts: none."
    step, most = np.unravel_index(np.nanargmax(values), values.shape)
    return (
        f"Casts clipped {clipped.any(0).sum()} of {len(outcome.tensors)} tensors at least once, and "
        f"{clipped[-1].sum()} at the end. The largest was {values[step, most]:.1f} times the range of FP8: "
        f"{_name(outcome.tensors[most])}, before step {outcome.curves.scale_steps[step]:,}."
    )


def _unscaled(outcome: Outcome) -> str:
    """How many tensors have the scaling state of `init` at the end of the run, and which."""
    curves = outcome.curves
    if not outcome.tensors or not curves.scales:
        return ""
    without_amax = (np.array(curves.scales[-1]) == UNSET) | (np.max(curves.saturations, axis=0) == 0)
    if not without_amax.any():
        return "Tensors without an amax: none."
    names = [_name(outcome.tensors[i]) for i in np.flatnonzero(without_amax)]
    return (
        f"No step recorded an amax for {len(names)} of {len(outcome.tensors)} tensors, and their scales are "
        "those of init: the tensor is zero in all steps, its layer is not used, or the new scaling state was "
        f"dropped: {', '.join(names[:10])}{', ...' if names[10:] else ''}."
    )


def _name(tensor: ScaledTensor) -> str:
    return " ".join(part for part in (tensor.layer, tensor.number, tensor.operand) if part)


def _skipped(outcomes: Mapping[str, Outcome]) -> str:
    """The skipped steps of each model."""
    found = []
    for name, outcome in outcomes.items():
        steps = outcome.curves.skipped
        if steps:
            listed = ", ".join(f"{step:,}" for step in steps[:10]) + (", ..." if len(steps) > 10 else "")
            found.append(f"{name} skipped {len(steps):,} of {len(outcome.curves.loss):,} steps: {listed}.")
    return " ".join(found) or "Skipped steps: none."


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
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>" + "\n".join(lines) + "</table>"
