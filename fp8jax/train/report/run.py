"""The report of trainers at the end of their run."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.train import metrics
from fp8jax.train.metrics import Curves
from fp8jax.train.report import report
from fp8jax.train.report.memory import memory_of_step
from fp8jax.train.step.learner import State
from fp8jax.train.trainer import Trainer


def write_report(
    folder: pathlib.Path,
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    models: Sequence[tuple[Trainer, State, Curves]],
    layers: Sequence[str],
    per_step: tuple[int, str],
) -> pathlib.Path:
    """Shows the table and writes the page, see `report.write`; returns the path of the page.

    Args:
        folder: of the run.
        about: "data", and what else the page says; passes `check_about`.
        settings: of the run.
        models: each trainer, its last state, and its metrics.
        layers: for each model which layers run in FP8.
        per_step: the tokens or rows of a step, and their unit.
    """
    outcomes = {}
    for (trainer, state, curves), text in zip(models, layers, strict=True):
        collections = trainer.learner.collections(state.variables)
        batch = trainer.batch, trainer.key, state.step
        outcomes[str(trainer.config.precision)] = report.Outcome(
            curves=curves,
            amount=per_step[0],
            unit=per_step[1],
            parameters=metrics.parameters(collections),
            bytes=metrics.bytes_per_parameter(collections, trainer.gradients(), state.opt_state),
            tensors=metrics.scaled_tensors(collections),
            layers=text,
            memory=memory_of_step(state.variables, state.opt_state, batch, trainer.program),
        )
    page = report.write(folder, {**about, **_own(models[0][0], settings)}, outcomes)
    report.show(outcomes)
    return page


def check_about(about: Mapping[str, Any], trainer: Trainer) -> None:
    """Raises ValueError for an `about` that the report cannot hold, or says itself."""
    try:
        json.dumps(dict(about), allow_nan=False)
        odd = next((repr(name) for name in about if not isinstance(name, str)), None)
    except (TypeError, ValueError) as error:
        odd = str(error)
    if odd:
        raise ValueError(f"`about`: expected names with values that JSON can hold; got {odd}")
    taken = sorted(about.keys() & {*_own(trainer, {}), "gap", "models"})  # `report.write` adds the last two
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken)
        raise ValueError(f"`about`: the report itself says {listed}; give it another name")


def _own(trainer: Trainer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the report says of a trainer."""
    size = {"devices": trainer.placement.mesh.size, "rows of a step": trainer.rows}
    return {**report.machine(), **size, "settings": settings}
