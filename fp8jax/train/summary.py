"""The report of a `Trainer`'s run: what `fp8jax.train.report` asks, answered by the trainer and its state."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from fp8jax.train import config, observe, report
from fp8jax.train.footprint import Footprint, footprint
from fp8jax.train.learner import State
from fp8jax.train.observe import Curves
from fp8jax.train.trainer import Trainer


def write(
    trainer: Trainer,
    state: State,
    curves: Curves,
    folder: pathlib.Path,
    per_step: tuple[int, str],
    about: Mapping[str, Any],
) -> pathlib.Path:
    """Shows the table and writes the page, see `report.write`.

    Args:
        trainer: of the run.
        state: its last.
        curves: its own.
        folder: of the run.
        per_step: what a step sees: how many, of what.
        about: "data", and what else the page should say; passes `check`.

    Returns:
        The page's path.
    """
    collections, (amount, unit) = trainer.learner.collections(state.variables), per_step
    outcome = report.Outcome(
        curves=curves,
        amount=amount,
        unit=unit,
        parameters=observe.parameters(collections),
        bytes=observe.bytes_per_parameter(collections, trainer.gradients(), state.opt_state),
        tensors=observe.tensors(collections),
        layers=trainer.layers,
        footprint=memory_of(trainer, state),
    )
    outcomes = {str(trainer.config.precision): outcome}
    page = report.write(folder, {**about, **_own(trainer)}, outcomes)
    report.show(outcomes)
    return page


def check(about: Mapping[str, Any], trainer: Trainer) -> None:
    """Raises ValueError for an `about` that `write` could not write, or would write over."""
    try:
        json.dumps(dict(about), allow_nan=False)
        odd = next((repr(name) for name in about if not isinstance(name, str)), None)
    except (TypeError, ValueError) as error:
        odd = str(error)
    if odd:
        raise ValueError(f"`about`: expected names with values that JSON can hold; got {odd}")
    taken = sorted(about.keys() & {*_own(trainer), "gap", "models"})  # two that `report.write` adds
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken)
        raise ValueError(f"`about`: the report itself says {listed}; give it another name")


def _own(trainer: Trainer) -> dict[str, Any]:
    """What the report says of a trainer."""
    place = {"devices": trainer.place.mesh.size, "rows of a step": trainer.rows}
    return {**report.machine(), **place, "settings": config.kept(trainer.config)}


def memory_of(trainer: Trainer, state: State) -> Footprint:
    """The memory of a trainer's step by part."""
    batch = (trainer.batch, trainer.key, state.step)
    return footprint(state.variables, state.opt_state, batch, trainer.program)
