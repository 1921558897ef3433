"""Checks that `fit` makes: of the rows before it trains, and of a run that diverges."""

import contextlib
import math
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, PyTree

from fp8jax.recipe import Recipe
from fp8jax.train import distributed
from fp8jax.train.config import TrainConfig, fixed_options, saved_options
from fp8jax.train.data.loader import Examples
from fp8jax.train.errors import Diverged
from fp8jax.train.metrics import Curves
from fp8jax.train.run import not_finite
from fp8jax.train.run_folder import OF_TWIN, ROWS, RunMetadata
from fp8jax.train.step.network import RunState
from fp8jax.train.trainer import Trainer

ROWS_TO_BLAME = 100  # of the data, that an error looks at


def check_trained(
    recipe: Recipe, curves: Curves, most: int, examples: Examples, layer_of: Callable[[], str]
) -> None:
    """Raises Diverged if the last `most` steps were skipped.

    Args:
        recipe: of the model.
        curves: of the model.
        most: `max_skipped_steps`, or all steps of the run.
        examples: rows of the data, to blame.
        layer_of: gives the layer that computed the last step's first number that is not finite, or "".
    """
    steps = len(curves.loss)
    trained = next(step for step in range(steps, -1, -1) if step not in curves.skipped)  # the last one, or 0
    if steps - trained < most:
        return
    rows = (examples[i] for i in range(min(len(examples), ROWS_TO_BLAME)))
    bad = {
        jax.tree_util.keystr(path)
        for row in rows
        for path, leaf in jax.tree.leaves_with_path(row)
        if not np.all(np.isfinite(leaf))
    }
    cause = (
        f"batch{min(bad)} of the data has such numbers"
        if bad
        else "the data's first rows have no such number"
    )
    layer = layer_of()
    raise Diverged(
        f"{recipe}: nothing is trained: the last {most} steps were all skipped, because gradients were "
        f"infinite or not a number; the first of them was step {trained + 1}; {cause}; "
        + (f"the first layer that computed one was {layer}; " if layer else "")
        + ("run the recipe bf16 to see whether FP8 matters; " if recipe.is_quantized else "")
        + "in your own loop, with the recipe bf16, JAX_DEBUG_NANS=true names the operation"
    )


def check_finite(name: str, curves: Curves, arrays: Sequence[str], saved: int | None) -> None:
    """Raises Diverged, in the place of a checkpoint, if the state has numbers that are not finite.

    Args:
        name: of the model.
        curves: of the model.
        arrays: the paths of such arrays of the state.
        saved: the step of the newest checkpoint.
    """
    if not arrays:
        return
    first = next((step for step, loss in enumerate(curves.loss, 1) if not math.isfinite(loss)), None)
    since = f"the loss is not finite since step {first}" if first else "all losses were finite"
    others = f" and {len(arrays) - 1} more" if arrays[1:] else ""
    raise Diverged(
        f"{name}: after step {len(curves.loss)} the state has numbers that are not finite, in {arrays[0]}"
        f"{others}; {since}; it is not saved, and "
        + (f"--resume goes on after step {saved}" if saved else "no checkpoint was saved before")
    )


def bad_arrays(trainer: Trainer, state: RunState) -> list[str]:
    """The paths of arrays of a state with NaN; and with infinite numbers, if they are trained."""
    trained = trainer.network.trained(state.variables), state.opt_state
    return [*not_finite.bad_arrays(trained), *not_finite.bad_arrays(state.variables, _is_number)]


def _is_number(x: Array) -> Bool[Array, "..."]:
    return ~jnp.isnan(x)


def bad_layer(trainer: Trainer, state: RunState, batch: PyTree) -> str:
    """The layer that computed the first number that was not finite in the skipped step before `state`.

    One device of each process computes the step again, on the whole weights and the rows of each device in
    turn. On several devices the random numbers, as for dropout, are others than those of the step.

    Returns:
        As `not_finite.first_bad_layer`; "" where that fails, for an error is on its way.
    """
    key = jax.random.fold_in(trainer.key, state.step - 1)
    network, devices = trainer.network.on_one_device(), trainer.placement.mesh.size

    def gradients(variables: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        return network.gradients(variables, batch, key)[:2]

    with contextlib.suppress(Exception), trainer.precision():
        variables, batch = jax.tree.map(_whole, (state.variables, batch))
        rows = trainer.rows // devices
        for start in range(0, trainer.rows, rows):
            part = jax.tree.map(lambda x, at=start: x[at : at + rows], batch)
            if found := not_finite.first_bad_layer(gradients, variables, part):
                return found
    return ""


def _whole(x: jax.Array) -> jax.Array:
    """An array on one device of this process."""
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return jax.device_put(x, jax.local_devices()[0])


def check_names(options: Collection[str]) -> None:
    """Raises ValueError if an option has the name of another setting of a run."""
    if taken := {ROWS, OF_TWIN}.intersection(options):
        raise ValueError(
            f"`options`: expected no field `{min(taken)}`, which a run itself saves; give it another name"
        )


def check_rows(trainer: Trainer, examples: Examples) -> None:
    """Raises ValueError if the rows do not fit the trainer."""
    if not len(examples):
        raise ValueError("`source` is empty")
    trainer.check(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((trainer.rows, *x.shape), x.dtype), examples[0])
    )


def check_twin(twin: Trainer, trainer: Trainer) -> None:
    """Raises ValueError if a twin has the trainer's recipe, or other batches or devices."""
    if twin.config.precision == trainer.config.precision:
        raise ValueError(f"`twin`: expected another recipe; both are {twin.config.precision}")
    expected, got = ((one.rows, one.placement.mesh.size) for one in (trainer, twin))
    if expected != got:
        raise ValueError(
            f"`twin`: expected batches of {expected[0]} rows over {expected[1]} devices, as the trainer's; "
            f"got {got[0]} rows over {got[1]}"
        )


def options_of_twin(twin: TrainConfig, config: TrainConfig) -> str:
    """The twin's recipe and, of its options that a resumed run cannot change, those that differ from the
    trainer's, as flags."""
    of_twin, of_trainer = saved_options(twin), saved_options(config)
    names = fixed_options(TrainConfig) - {"recipe", "fp16", "bf16"}
    others = {name: value for name, value in of_twin.items() if name in names and value != of_trainer[name]}
    values = {"recipe": twin.precision, **others}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


def fingerprint(sources: Sequence[Examples | None], like: str = "") -> str:
    """The fingerprints of a run's sources, for `RunMetadata.data`: "none" for one that is not given.

    Args:
        sources: `source`, `validation` and `final_validation`.
        like: the fingerprints to compare with; an older run has that of `source` alone.
    """
    pairs = zip(sources, like.split("; ") if like else [""] * len(sources), strict=False)
    return "; ".join("none" if source is None else source.fingerprint(before) for source, before in pairs)


def check_processes(now: RunMetadata) -> None:
    """Raises ValueError in all processes if one has other settings or data than process 0."""
    first = RunMetadata(*distributed.decide(lambda: now))
    if distributed.any_of(first.digest != now.digest):
        before, given = ({**each.settings, "data": each.data} for each in (first, now))
        others = [name for name in {**before, **given} if before.get(name) != given.get(name)]
        got = f"process {jax.process_index()} got other {', '.join(others)} than process 0"
        raise ValueError(
            "expected the same settings and data in all processes, each of which reads its rows of every "
            f"batch; {got if others else 'another process got others, which it names'}; give all the same"
        )


def check_batches(trainer: Trainer, folder: pathlib.Path, found: RunMetadata) -> None:
    """Raises ValueError if the trainer's batches have another number of rows than the run's."""
    rows = found.settings.get(ROWS, trainer.rows)
    if rows != trainer.rows:
        raise ValueError(
            f"the run in {folder} has batches of {rows} rows; got {trainer.rows}: devices "
            f"({trainer.placement.mesh.size}) x --gradient-accumulation-steps "
            f"({trainer.config.gradient_accumulation_steps}) x --per-device-train-batch-size must be {rows}"
        )
