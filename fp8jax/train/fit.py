"""A whole run of a `Trainer`: batches, checkpoints, validation, a display, a report.

    run = fit(trainer, rows, validation=held_out, validation_loss=loss)
    run.state, run.curves.loss, run.folder / "report.html"
    fit(trainer, rows, resume=True)              # goes on from the newest checkpoint

A run that was stopped or killed ends, resumed, with the same losses, bit for bit, as one that was left alone:
a checkpoint has the state, the curves, and where the batches stopped that were trained on. Ctrl-C and SIGTERM
end the steps up to the next display, save, and return. Over another number of devices, or with other
accumulation steps, a run goes on if its batches have as many rows: the same ones, with other roundings.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8jax.train import config, extras, observe, processes, rundir, stop, summary
from fp8jax.train.learner import Loss, State
from fp8jax.train.loader import Examples, Loader, Source
from fp8jax.train.observe import Curves, Seen
from fp8jax.train.progress import Progress, spans
from fp8jax.train.to_device import DevicePrefetch
from fp8jax.train.tokens import TokenFile
from fp8jax.train.trainer import Trainer

_WORDS = rundir.Words("--output-dir", "resume=True", "or_start=True", "give {flag} as it was", "trainer")
# What counts is the rows that they come to.
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "memory_budget", "target")


class Fitted(NamedTuple):
    """What a run came to."""

    folder: pathlib.Path  # with report.html, unless the run was stopped
    state: State
    curves: Curves
    steps: int  # done; fewer than `max_steps` if it was stopped


def fit(
    trainer: Trainer,
    source: Source,
    *,
    transform: Callable[[Any], Any] | None = None,
    validation: Source | None = None,
    validation_loss: Loss | None = None,
    plain: Any = None,
    resume: bool = False,
    or_start: bool = False,
    about: Mapping[str, Any] | None = None,
) -> Fitted:
    """Trains until `max_steps`, and leaves a report in the run's folder.

    Args:
        trainer: whose config says how often to log, validate and save, and where to.
        source: rows by number, see `Loader`.
        transform: row -> row, a pure function, of both sources.
        validation: rows that are not trained on. Every `eval_steps` steps and at the end all of them are seen
            in the same batches, but for the last few that fill none; a thread reads them.
        validation_loss: their loss, see `Trainer.evaluator`.
        plain: as in `Trainer.init`; a run that is resumed does not look at it.
        resume: goes on with the run in `output_dir`, or with the newest in runs/.
        or_start: `resume` begins at step 0 where there is no run, or none of its checkpoints is whole.
        about: what else the report should say, e.g. {"data": "the letters of Rilke"}: JSON values, under
            names that the report has no use for.

    Raises:
        ValueError: the folder is that of another run, or of a run and `resume` is not set, or of none and it
            is, or another run took it meanwhile; all checkpoints are damaged; the run had batches of other
            rows; a source is shorter than a batch; its rows are not like the trainer's example; one of
            `validation` and `validation_loss` is missing; or `about` has what JSON cannot hold, or a name
            that the report uses.
        OSError: a checkpoint or the report cannot be written; checkpoints before it are as they were.
        ImportError: the extra `train` is not installed.
    """
    extras.check("grain")
    summary.check(about or {}, trainer)
    folder, found, now = _folder(trainer, Examples(source, transform), resume, or_start)
    digest = (found if found.settings else now).digest
    with contextlib.closing(trainer.loader(source, transform)) as batches:
        validate = _validation(trainer, validation, transform, validation_loss)
        print(f"{trainer.layers.splitlines()[0]}; compiling", flush=True)
        rundir.start(folder, found, now, _WORDS)
        with rundir.given_back(folder, found):
            _ = trainer.program
            run = _begun(trainer, folder, digest, batches, plain, resume, or_start)
            if validate and run.steps < trainer.config.max_steps:
                validate(run.state, 1)  # what is wrong with it shows now
        processes.on_loss(lambda: rundir.how_to_go_on(folder, _WORDS))
        per_step = _per_step(source, trainer.rows)
        with stop.requests() as stop_asked:
            _train(run, validate, per_step, stop_asked)
    if run.steps < trainer.config.max_steps:
        print(f"stopped and saved after step {run.steps} in {folder}; resume=True goes on with it")
    elif processes.is_first():
        about = {"data": f"{len(source):,} rows of a {type(source).__name__}", **(about or {})}
        print(f"report: {summary.write(trainer, run.state, run.curves, folder, per_step, about)}")
    return Fitted(folder, run.state, run.curves, run.steps)


def advance(
    step: Callable[[Any, Any], tuple[Any, Seen]], state: Any, batches: Iterable[Any], curves: Curves
) -> Any:
    """One step per batch; waits for the device only at the end."""
    seen, begun = [], time.perf_counter()
    for batch in batches:
        state, of_step = step(state, batch)
        seen.append(of_step)
    seen = jax.device_get(seen)
    curves.add(seen, time.perf_counter() - begun)
    return state


@dataclasses.dataclass
class _Run:
    """A run as it goes."""

    trainer: Trainer
    folder: pathlib.Path
    digest: str  # of how it began
    batches: DevicePrefetch
    state: Any
    curves: Curves
    saved: int | None = None  # the step that was saved last, or restored

    @property
    def steps(self) -> int:
        return len(self.curves.loss)

    def save(self) -> None:
        """Writes a checkpoint, unless this step has one; what was read ahead is not in the batches' state."""
        if self.steps == self.saved:
            return
        rundir.keep(
            self.folder,
            self.steps,
            self.state,
            observe.pack([self.curves]),
            data=self.batches.state(),
            run=self.digest,
        )
        self.saved = self.steps


def _folder(
    trainer: Trainer, examples: Examples, resume: bool, or_start: bool
) -> tuple[pathlib.Path, rundir.Began, rundir.Began]:
    """The run's folder, how the run in it began, and how it would now."""
    folder = rundir.choose(trainer.config.output_dir, resume, or_start, _WORDS)
    found = rundir.began(folder, [*(field.name for field in dataclasses.fields(trainer.config)), "rows"])
    if not len(examples):
        raise ValueError("`source` is empty")
    trainer.check(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((trainer.rows, *x.shape), x.dtype), examples[0])
    )
    _check_rows(trainer, folder, found.settings.get("rows", trainer.rows))
    now = rundir.Began({**config.kept(trainer.config), "rows": trainer.rows}, examples.fingerprint())
    lasting = {name: value for name, value in found.settings.items() if name not in _BATCH}
    rundir.check_same(folder, found._replace(settings=lasting), now, _WORDS)
    return folder, found, now


def _check_rows(trainer: Trainer, folder: pathlib.Path, rows: int) -> None:
    """Raises ValueError if the run in `folder` has batches of another size, with the settings for its own."""
    if rows == trainer.rows:
        return
    devices, steps = trainer.place.mesh.size, trainer.config.gradient_accumulation_steps
    on = f"with {devices} device{'s' * (devices > 1)}"
    if rows % (devices * steps) == 0:
        advice = f"{on} give --per-device-train-batch-size {rows // devices // steps}"
    elif rows % devices == 0:
        size = rows // devices
        advice = f"{on} give --per-device-train-batch-size {size} --gradient-accumulation-steps 1"
    else:
        advice = f"give a number of --devices that divides {rows}"
    raise ValueError(f"the run in {folder} has batches of {rows} rows; got {trainer.rows}: {advice}")


def _begun(
    trainer: Trainer,
    folder: pathlib.Path,
    digest: str,
    batches: DevicePrefetch,
    plain: Any,
    resume: bool,
    or_start: bool,
) -> _Run:
    """The run from its newest whole checkpoint on, or from its beginning."""
    found = rundir.resume(folder, trainer.like, digest, or_start, _WORDS) if resume else None
    if found is None:
        return _Run(trainer, folder, digest, batches, trainer.init(plain), Curves())
    batches.restore(found.data)
    [curves] = observe.unpack(found.history)
    return _Run(trainer, folder, digest, batches, found.state, curves, found.step)


def _train(
    run: _Run,
    validate: Callable[[State], float] | None,
    per_step: tuple[int, str],
    stop_asked: Callable[[], bool],
) -> None:
    """Trains until the last step or until asked to stop."""
    settings, name = run.trainer.config, str(run.trainer.config.precision)
    last, intervals = settings.max_steps, (settings.logging_steps, settings.eval_steps, settings.save_steps)
    if run.steps < last:
        run.batches.read_ahead()  # workers take seconds to start
    with Progress({name: run.curves}, last, *per_step) as progress:
        for begin, end in spans(run.steps, last, *intervals):
            if stop_asked():
                run.save()
                return
            batches = itertools.islice(run.batches, end - begin)
            run.state = advance(run.trainer.step, run.state, batches, run.curves)
            if validate and (end % settings.eval_steps == 0 or end == last):
                run.curves.validation.append((end, validate(run.state)))
            progress.show()
            if end % settings.save_steps == 0 or end == last:
                run.save()


def _validation(
    trainer: Trainer,
    source: Source | None,
    transform: Callable[[Any], Any] | None,
    loss: Loss | None,
) -> Callable[..., float] | None:
    """The mean loss of the first batches of a source, by default of all; None without a source."""
    if (source is None) != (loss is None):
        raise ValueError(
            "`validation` and `validation_loss` go together: the rows, and how the model is called on them"
        )
    if source is None or loss is None:
        return None
    devices = trainer.place.mesh.size
    rows = min(trainer.per_device, len(source) // devices) * devices
    if not rows:
        raise ValueError(f"`validation` has {len(source)} rows, fewer than the {devices} devices")
    evaluate = trainer.evaluator(loss)

    def validate(state: State, most: int | None = None) -> float:
        with Loader(source, batch=rows, seed=0, shuffle=False, epochs=1, transform=transform) as batches:
            # One after the other: a queue of batches would take the memory of the next step.
            losses = [float(evaluate(state, batch)) for batch in itertools.islice(batches, most)]
        return float(np.mean(losses))

    return validate


def _per_step(source: Any, rows: int) -> tuple[int, str]:
    """What a step sees: how many, of what."""
    return (rows * source.context, "tokens") if isinstance(source, TokenFile) else (rows, "rows")
