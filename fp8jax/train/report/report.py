"""The report of a run: a table on the terminal, and in its folder pictures, a page and numbers.

    outcomes = {"O2": outcome_of(trainer, state, curves, (768, "tokens"))}
    show(outcomes)                              # the table
    write(folder, about, outcomes)              # report.html, losses.png, ..., result.json

`report.html` contains its pictures, so it can be sent to someone as one file.
"""

import contextlib
import datetime
import json
import math
import pathlib
import platform
import shlex
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax

from fp8jax.extras import need
from fp8jax.train.report import figures, page
from fp8jax.train.report.outcome import Outcome, Outcomes
from fp8jax.train.run_folder import write as write_file
from fp8jax.train.trainer import Trainer

# The parts of the comparison: what was trained, what FP8 saved, what went wrong.
SECTIONS = ("trained", "saved", "wrong")


def rows(outcomes: Outcomes, sections: Collection[str] = SECTIONS) -> list[list[str]]:
    """The comparison as text: a heading, then one row per quantity of the sections."""
    first = next(iter(outcomes.values()))
    loss = first.loss_name + (", last tenth" if first.validation_loss is None else "")
    of_speed = "trained" if first.is_of_cpu else "saved"
    lines: list[tuple[str, str, Any]] = [
        ("trained", loss, lambda o: f"{o.final_loss:.4f}"),
        (of_speed, f"{first.unit}/s", lambda o: f"{o.curves.steps_per_second * o.amount:,.0f}"),
        ("trained", "steps", lambda o: f"{len(o.curves.loss):,}"),
        ("wrong", "steps skipped", lambda o: f"{len(o.curves.skipped):,}"),
        ("trained", "parameters", lambda o: f"{o.parameters:,}"),
        (of_speed, "time in steps", lambda o: f"{o.curves.seconds:.1f} s"),
        ("saved", "bytes per parameter: weights", lambda o: f"{o.bytes.weights:.2f}"),
        ("saved", "bytes per parameter: gradients", lambda o: f"{o.bytes.gradients:.2f}"),
        ("saved", "bytes per parameter: optimizer", lambda o: f"{o.bytes.optimizer:.2f}"),
        ("saved", "bytes per parameter: scaling state", lambda o: f"{o.bytes.scaling:.2f}"),
    ]
    if any(o.curves.unchanged for o in outcomes.values()):
        lines.append(("wrong", "weights that a step left unchanged: mean, last", _unchanged))
    chosen = [(label, value) for section, label, value in lines if section in sections]
    table = [["", *outcomes], *([label, *map(value, outcomes.values())] for label, value in chosen)]
    if len(outcomes) == 2 and "trained" in sections:
        table.insert(2, ["gap", f"{gap(outcomes):+.4f}", ""])
    return table


def _unchanged(outcome: Outcome) -> str:
    found = outcome.curves.unchanged
    return f"{outcome.mean_unchanged:.0%}, {found[-1][1]:.0%}" if found else "-"


def advice(outcomes: Outcomes) -> list[str]:
    """A sentence for each model of which steps left most weights unchanged."""
    return [
        f"On average a step of {name} left {outcome.mean_unchanged:.0%} of the weights unchanged, because "
        "updates were below half of their last bit. Take the recipe fp8, or a larger learning rate."
        for name, outcome in outcomes.items()
        if outcome.mean_unchanged > 0.5
    ]


def gap(outcomes: Outcomes) -> float:
    """Final loss of the first model minus the second's."""
    first, second = outcomes.values()
    return first.final_loss - second.final_loss


def show(outcomes: Outcomes) -> None:
    """Prints the comparison."""
    heading, *body = rows(outcomes)
    table = need("rich.table").Table(*heading, box=need("rich.box").SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in body:
        table.add_row(*row)
    need("rich.console").Console().print(table, *advice(outcomes), sep="\n")


def write(
    folder: pathlib.Path, about: Mapping[str, Any], outcomes: Outcomes, diverged: str = ""
) -> pathlib.Path:
    """Writes the pictures, the page and the numbers into the folder, and returns the path of the page.

    Args:
        folder: of the run.
        about: settings, data, device, versions, and so on; JSON values.
        outcomes: name -> outcome; the first is the recipe, a second one its twin.
        diverged: the error of a run that ended with one, which the page begins with.

    Raises:
        OSError: a file cannot be written.
    """
    recipe = next(iter(outcomes.values()))
    label = f"loss ({about['loss']})" if "loss" in about else "loss"
    pictures = {"losses.png": figures.losses({name: o.curves for name, o in outcomes.items()}, label)}
    if recipe.tensors and recipe.curves.scales:
        pictures["scales.png"] = figures.scales(recipe.tensors, recipe.curves)
        pictures["saturation.png"] = figures.saturations(recipe.tensors, recipe.curves)
    tables = {section: rows(outcomes, [section]) for section in SECTIONS}
    files: dict[str, str | bytes] = {
        **pictures,
        "result.json": json.dumps(
            {**_result(about, outcomes), "diverged": diverged or None}, indent=1, allow_nan=False
        ),
        "report.html": page.page(about, outcomes, tables, diverged or verdict(outcomes), pictures),
    }
    for name in files:
        if (folder / name).is_dir():  # checked first, so that either all files are replaced or none
            raise OSError(f"{folder / name} cannot be written (Is a directory); move it away and resume")
    for name, content in files.items():
        write_file(folder / name, content)
    return folder / "report.html"


def _result(about: Mapping[str, Any], outcomes: Outcomes) -> dict[str, Any]:
    models = {
        name: {
            "validation_loss": _number(outcome.validation_loss),
            f"{outcome.unit}_per_second": outcome.curves.steps_per_second * outcome.amount,
            "seconds_in_steps": outcome.curves.seconds,
            "steps": len(outcome.curves.loss),
            "skipped_steps": outcome.curves.skipped,
            "unchanged_weights": outcome.curves.unchanged,
            "parameters": outcome.parameters,
            "bytes_per_parameter": outcome.bytes._asdict(),
            "memory": [part._asdict() for part in outcome.memory],
            "training_losses": list(map(_number, outcome.curves.loss)),
            "validation_losses": [(step, _number(loss)) for step, loss in outcome.curves.validation],
        }
        for name, outcome in outcomes.items()
    }
    return {**about, "gap": _number(gap(outcomes)) if len(outcomes) == 2 else None, "models": models}


def _number(x: float | None) -> float | None:
    """None for infinity and NaN, which JSON does not have; the loss of a skipped step may be one."""
    return x if x is not None and math.isfinite(x) else None


def verdict(outcomes: Outcomes) -> str:
    """The result in a sentence or two."""
    (name, recipe), *twins = outcomes.items()
    reached = f"{name} reached a {recipe.loss_name} of {recipe.final_loss:.4f}"
    advised = "".join(f" {sentence}" for sentence in advice(outcomes))
    if not twins:
        return f"{reached}.{advised}"
    twin_name, twin = twins[0]
    side = "above" if gap(outcomes) > 0 else "below"
    sizes = [o.bytes.weights + o.bytes.gradients + o.bytes.optimizer for o in (recipe, twin)]
    return (
        f"{reached}, {abs(gap(outcomes)):.4f} {side} its {twin_name} twin ({twin.final_loss:.4f}), which "
        "started from the same weights and saw the same batches. Weights, gradients and optimizer state took "
        f"{sizes[0]:.1f} bytes per parameter, the twin's {sizes[1]:.1f}.{advised}"
    )


def machine() -> dict[str, Any]:
    """The device and the versions of a run, for `about`."""
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}{_of_cpu()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }


def _of_cpu() -> str:
    """ " with AVX512-BF16" for a CPU that has it: its bfloat16 numbers differ. Linux alone says so."""
    with contextlib.suppress(OSError):
        if jax.default_backend() == "cpu" and "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text():
            return " with AVX512-BF16"
    return ""


def facts(trainer: Trainer, settings: Mapping[str, Any], begun: float, resumed: int) -> dict[str, Any]:
    """The part of `about` that the report knows itself: occasion, device, versions, size, settings.

    Args:
        trainer: of the recipe.
        settings: of the run.
        begun: the time at which this start of the run began, as `time.time` gives it.
        resumed: the step after which it began.
    """
    date = datetime.datetime.fromtimestamp(begun, datetime.UTC)
    occasion = {
        "date": f"{date:%Y-%m-%d %H:%M} UTC",
        "seconds": time.time() - begun,
        "resumed after step": resumed,
        "command": shlex.join(sys.orig_argv),
    }
    size = {"devices": trainer.placement.mesh.size, "rows of a step": trainer.rows}
    # An option may be infinite, and JSON has no such number.
    named = json.loads(json.dumps(settings), parse_constant=str)
    return {**occasion, **machine(), **size, "settings": named}


def check_about(about: Mapping[str, Any], trainer: Trainer) -> None:
    """Raises ValueError for an `about` that the report cannot hold, or says itself."""
    try:
        json.dumps(dict(about), allow_nan=False)
        odd = next((repr(name) for name in about if not isinstance(name, str)), None)
    except (TypeError, ValueError) as error:
        odd = str(error)
    if odd:
        raise ValueError(f"`about`: expected names with values that JSON can hold; got {odd}")
    taken = sorted(
        about.keys() & {*facts(trainer, {}, 0.0, 0), "diverged", "gap", "models"}
    )  # the result has the last three
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken)
        raise ValueError(f"`about`: the report itself says {listed}; give it another name")
