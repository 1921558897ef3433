"""What a run leaves behind: a table on the terminal, and in its folder pictures, a page and numbers.

    show(outcomes)                              # the table
    write(folder, about, outcomes)              # report.html, losses.png, ..., result.json

`report.html` holds its pictures itself, so that it can be sent to someone as one file.
"""

import base64
import html
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8jax.train import figures
from fp8jax.train.extras import need
from fp8jax.train.observe import Bytes, Curves, Tensor
from fp8jax.train.rundir import write as write_file


class Outcome(NamedTuple):
    """One model at the end of a run."""

    curves: Curves
    tokens: int  # per step
    parameters: int
    bytes: Bytes
    tensors: list[Tensor]  # those with a delayed scale; may be empty
    layers: str  # which layers run in FP8 and why the others do not

    @property
    def validation_loss(self) -> float:
        """The last one: taken after the last step."""
        return self.curves.validation[-1][1]

    @property
    def tokens_per_second(self) -> float:
        """In training steps, without compiling and evaluating."""
        return len(self.curves.loss) * self.tokens / max(self.curves.seconds, 1e-9)


Outcomes = Mapping[str, Outcome]


def rows(outcomes: Outcomes) -> list[list[str]]:
    """The comparison as text: a heading, then one row per quantity."""
    lines: list[tuple[str, Any]] = [
        ("validation loss", lambda o: f"{o.validation_loss:.4f}"),
        ("tokens/s", lambda o: f"{o.tokens_per_second:,.0f}"),
        ("steps", lambda o: f"{len(o.curves.loss):,}"),
        ("parameters", lambda o: f"{o.parameters:,}"),
        ("time in steps", lambda o: f"{o.curves.seconds:.1f} s"),
        ("bytes per parameter: weights", lambda o: f"{o.bytes.weights:.2f}"),
        ("bytes per parameter: gradients", lambda o: f"{o.bytes.gradients:.2f}"),
        ("bytes per parameter: optimizer", lambda o: f"{o.bytes.optimizer:.2f}"),
        ("bytes per parameter: scaling state", lambda o: f"{o.bytes.scaling:.2f}"),
    ]
    table = [["", *outcomes], *([label, *map(value, outcomes.values())] for label, value in lines)]
    if len(outcomes) == 2:
        table.insert(2, ["gap", f"{gap(outcomes):+.4f}", ""])
    return table


def gap(outcomes: Outcomes) -> float:
    """Validation loss of the first model minus that of the second."""
    first, second = outcomes.values()
    return first.validation_loss - second.validation_loss


def show(outcomes: Outcomes) -> None:
    """Prints the comparison."""
    heading, *body = rows(outcomes)
    table = need("rich.table").Table(*heading, box=need("rich.box").SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in body:
        table.add_row(*row)
    need("rich.console").Console().print(table)


def write(folder: pathlib.Path, about: Mapping[str, Any], outcomes: Outcomes) -> pathlib.Path:
    """Writes the pictures, the page and the numbers.

    Args:
        folder: of the run.
        about: what else a reader wants to know: settings, data, device, versions; JSON values.
        outcomes: name -> outcome; the first is the recipe, a second one its twin.

    Returns:
        The page's path.
    """
    pictures = _pictures(outcomes)
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
    write_file(folder / "result.json", json.dumps(_result(about, outcomes), indent=1))
    page = folder / "report.html"
    write_file(page, _page(about, outcomes, pictures))
    return page


def _pictures(outcomes: Outcomes) -> dict[str, bytes]:
    recipe = next(iter(outcomes.values()))
    pictures = {"losses.png": figures.losses({name: o.curves for name, o in outcomes.items()})}
    if recipe.tensors and recipe.curves.watched:
        pictures["scales.png"] = figures.scales(recipe.tensors, recipe.curves)
        pictures["saturation.png"] = figures.saturations(recipe.tensors, recipe.curves)
    return pictures


def _result(about: Mapping[str, Any], outcomes: Outcomes) -> dict[str, Any]:
    models = {
        name: {
            "validation_loss": outcome.validation_loss,
            "tokens_per_second": outcome.tokens_per_second,
            "seconds_in_steps": outcome.curves.seconds,
            "steps": len(outcome.curves.loss),
            "parameters": outcome.parameters,
            "bytes_per_parameter": outcome.bytes._asdict(),
            "training_losses": outcome.curves.loss,
            "validation_losses": outcome.curves.validation,
        }
        for name, outcome in outcomes.items()
    }
    return {**about, "gap": gap(outcomes) if len(outcomes) == 2 else None, "models": models}


def _page(about: Mapping[str, Any], outcomes: Outcomes, pictures: Mapping[str, bytes]) -> str:
    recipe = next(iter(outcomes))
    parts = [
        f"<h1>{_text(recipe)}: {len(outcomes[recipe].curves.loss):,} steps on {_text(about['data'])}</h1>",
        f"<p class=lead>{_text(_verdict(outcomes))}</p>",
        _table(rows(outcomes)),
        _figure("losses.png", pictures, "Loss", _LOSS_TEXT),
    ]
    if "scales.png" in pictures:
        parts += [
            _figure("saturation.png", pictures, "How full the FP8 range was", _SATURATION_TEXT),
            _figure("scales.png", pictures, "Scales", _SCALES_TEXT),
        ]
    else:
        parts.append(f"<h2>Scales</h2><p>{_text(recipe)} keeps no delayed scales: none to show.</p>")
    for name, outcome in outcomes.items():
        parts.append(f"<h2>Layers of {_text(name)}</h2><pre>{_text(outcome.layers)}</pre>")
    settings = [["setting", "value"], *([key, str(value)] for key, value in _flat(about))]
    parts += ["<h2>Settings</h2>", _table(settings)]
    return _PAGE.format(title=f"{_text(recipe)} - fp8jax", body="\n".join(parts))


def _verdict(outcomes: Outcomes) -> str:
    (name, recipe), *twins = outcomes.items()
    if not twins:
        return f"{name} reached a validation loss of {recipe.validation_loss:.4f}."
    twin_name, twin = twins[0]
    side = "above" if gap(outcomes) > 0 else "below"
    sizes = [o.bytes.weights + o.bytes.gradients + o.bytes.optimizer for o in (recipe, twin)]
    return (
        f"{name} reached a validation loss of {recipe.validation_loss:.4f}, {abs(gap(outcomes)):.4f} {side} "
        f"its {twin_name} twin ({twin.validation_loss:.4f}), which started from the same weights and saw the "
        f"same batches. Weights, gradients and optimizer state took {sizes[0]:.1f} bytes per parameter, the "
        f"twin's {sizes[1]:.1f}."
    )


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


_LOSS_TEXT = """Faint lines are the loss of each step's batch, full lines its running mean, dots the
validation loss on batches that never change. The twin's are wide and pale, to be seen where both agree. The
strip below is the difference of the two training losses on the same batches: noise around zero means that
the recipe learns as its twin does."""

_SATURATION_TEXT = """Before a product in FP8 each tensor is divided by its scale and cast. The map shows, per
tensor and over time, the largest magnitude that was cast as a share of the largest that FP8 can represent.
White is a range used to its end; blue leaves the top of the range unused, which costs nothing until small
values are lost at its bottom; red was larger than the scale expected and was clipped. Delayed scales look
back, so a little red while training changes quickly is normal, and lasting red is not. Each column is the
worst of the steps it stands for."""

_SCALES_TEXT = """The scale that each layer's tensors are cast with, on a logarithmic axis: the value that
code 1 stands for. A scale follows its tensor's largest magnitude. A scale that runs away upward is a layer
about to diverge."""

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
