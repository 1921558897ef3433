"""The page of a run: every table and picture with what it shows, for someone who did not write the program.

page(about, outcomes, rows, verdict, pictures)      # HTML, the pictures inside
"""

import base64
import html
from collections.abc import Iterable, Mapping
from typing import Any


def page(
    about: Mapping[str, Any],
    outcomes: Mapping[str, Any],
    rows: list[list[str]],
    verdict: str,
    pictures: Mapping[str, bytes],
) -> str:
    """The page as one file.

    Args:
        about: "data", and what else stands under the settings.
        outcomes: name -> `report.Outcome`; the first is the recipe.
        rows: the comparison, a heading first.
        verdict: a sentence or two.
        pictures: file name -> PNG.
    """
    recipe = next(iter(outcomes))
    parts = [
        f"<h1>{_text(recipe)}: {len(outcomes[recipe].curves.loss):,} steps on {_text(about['data'])}</h1>",
        f"<p class=lead>{_text(verdict)}</p>",
        _table(rows),
        f"<p>{_TABLE_TEXT}</p>",
        _figure("losses.png", pictures, "Loss", _LOSS_TEXT),
        f"<p>{_text(_skipped(outcomes))}</p>",
        f"<h2>Memory of a step</h2>\n<p>{_MEMORY_TEXT}</p>",
        *_memory(outcomes),
    ]
    if "scales.png" in pictures:
        parts += [
            _figure("saturation.png", pictures, "How full the FP8 range was", _SATURATION_TEXT),
            _figure("scales.png", pictures, "Scales", _SCALES_TEXT),
        ]
    else:
        parts.append(f"<h2>Scales</h2><p>{_text(recipe)} keeps no delayed scales: none to show.</p>")
    for name, outcome in outcomes.items():
        parts.append(f"<h2>Layers of {_text(name)}</h2>\n<p>{_LAYERS_TEXT}</p>")
        parts.append(f"<pre>{_text(outcome.layers)}</pre>")
    settings = [["setting", "value"], *([key, str(value)] for key, value in _flat(about))]
    parts += [f"<h2>Settings</h2>\n<p>{_SETTINGS_TEXT}</p>", _table(settings)]
    return _PAGE.format(title=f"{_text(recipe)} - fp8jax", body="\n".join(parts))


def _skipped(outcomes: Mapping[str, Any]) -> str:
    """Which steps of which model were skipped."""
    found = []
    for name, outcome in outcomes.items():
        steps = outcome.curves.skipped
        if steps:
            listed = ", ".join(f"{step:,}" for step in steps[:10]) + (", ..." if len(steps) > 10 else "")
            found.append(f"{name} skipped {len(steps):,} of {len(outcome.curves.loss):,} steps: {listed}.")
    if not found:
        return "Skipped steps: none were."
    return " ".join(found) + " " + " ".join(_SKIPPED_TEXT.split())


def _memory(outcomes: Mapping[str, Any]) -> Iterable[str]:
    """A table for each model."""
    for name, outcome in outcomes.items():
        heading, *body = outcome.footprint.table()
        yield _table([[f"{name}: {heading[0]}", *heading[1:]], *body])


def _flat(about: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Nested settings in one list."""
    pairs: list[tuple[str, Any]] = []
    for key, value in about.items():
        pairs += _flat(value) if isinstance(value, Mapping) else [(key, value)]
    return pairs


def _table(cells: list[list[str]]) -> str:
    heading, *body = cells
    lines = ["<table><tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in heading) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return "\n".join([*lines, "</table>"])


def _figure(name: str, pictures: Mapping[str, bytes], title: str, text: str) -> str:
    encoded = base64.b64encode(pictures[name]).decode()
    return f'<h2>{title}</h2>\n<p>{text}</p>\n<img alt="{title}" src="data:image/png;base64,{encoded}">'


def _text(value: Any) -> str:
    return html.escape(str(value))


_TABLE_TEXT = """A loss says how far predictions are from the data: less is better. Speed and time are
those of training steps, without compiling, validation and checkpoints. A skipped step changed no weight.
Bytes per parameter are what the model and its training state take for each trained number: float32
everywhere is 4 for weights, 4 for gradients and 8 for an Adam optimizer. Weights that are not trained, as
those below adapters, are none of them: they are in the table of memory."""

_LOSS_TEXT = """Faint lines are the loss of each step's batch, full lines its running mean, dots the
validation loss, on data that is not trained on and never changes. It should fall and then flatten;
validation that rises while training falls is a model that learns its data by heart. Where there is a
twin, a model trained the same way in wider numbers, its lines are wide and pale, to be seen where both
agree, and the strip below is the difference of the two training losses on the same batches: noise around
zero means that the recipe learns as its twin does."""

_SKIPPED_TEXT = """A step is skipped where a gradient is infinite or no number: weights, optimizer and
scales stay as they were, and training goes on. A few at the beginning are normal where a loss scale is
being found; many, or ever more, are a training that diverges. They are marked at the lower edge of the
picture."""

_MEMORY_TEXT = """"Arrays" is what the run's own arrays take between two steps, and "compiled" is what the
compiler reserved for the program of a step, which does not tell gradients, activations and temporaries
apart. Gradients are what each weight is to be moved by, activations what the forward pass keeps for the
backward one, moments what the optimizer remembers of earlier gradients, master weights a finer copy of
weights that are kept coarse. Weights that are not trained are weights here; what is kept in the memory of an
accelerator's host is left out."""

_SATURATION_TEXT = """Before a product in FP8, numbers of 8 bits, each tensor is divided by its scale and
rounded. The map shows, per tensor and over time, the largest magnitude that was rounded as a share of the
largest that FP8 can represent. White is a range used to its end; blue leaves the top of the range unused,
which costs nothing until small values are lost at its bottom; red was larger than the scale expected and
was clipped. Delayed scales look back, so a little red while training changes quickly is normal, and
lasting red is not. Each column is the worst of the steps it stands for."""

_SCALES_TEXT = """What each layer's tensors are divided by before they are rounded, on a logarithmic axis:
the value that the code 1 stands for. A scale follows its tensor's largest magnitude, so it is small for
gradients and moves most at the beginning. A scale that runs away upward is a layer about to diverge."""

_LAYERS_TEXT = """Each layer with the size of its weights and its share of the arithmetic of matrix
products: "yes" is in FP8, anything else is why it is not."""

_SETTINGS_TEXT = """What the run was started with; the same settings on the same data and device repeat
it."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222 }}
body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.6rem }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem }} .lead {{ font-size: 1.1rem }}
img {{ max-width: 100%; height: auto }} p {{ max-width: 46rem }}
pre {{ overflow-x: auto; font-size: 0.85rem }}
table {{ border-collapse: collapse; font-size: 0.95rem; font-variant-numeric: tabular-nums }}
th, td {{ padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid #ddd; text-align: left }}
td {{ overflow-wrap: anywhere }}
</style></head><body>
{body}
</body></html>
"""
