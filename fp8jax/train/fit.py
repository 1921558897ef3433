"""`fit`: a whole run of a `Trainer`, with checkpoints, validation, a display, metrics and a report.

    run = fit(trainer, rows, validation=held_out, validation_loss=loss)
    run.state, run.curves.loss, run.folder / "report.html"
    fit(trainer, rows, resume=True)              # goes on from the newest checkpoint

Every `eval_steps` steps and at the end, statistics of the newest batch's operands go into the folder, for the
report and for `fp8jax advise`.

A checkpoint has the state, the metrics, and the position in the data. So a run that was stopped or killed
ends, when it is resumed, with the same losses as one that was left alone, bit for bit. Ctrl-C and SIGTERM
finish the steps up to the next display, save, and return. A run can go on with other devices or microbatches
if its batches keep their number of rows: the same rows, with other roundings.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import PyTree

from fp8jax import signals
from fp8jax.extras import need
from fp8jax.train import distributed, run_folder
from fp8jax.train.config import fixed_options, saved_options
from fp8jax.train.data.loader import Examples, Source
from fp8jax.train.errors import Diverged, blame_input
from fp8jax.train.metrics import Curves
from fp8jax.train.report import report
from fp8jax.train.run import checks
from fp8jax.train.run.run import Callback, Model, Run, validator
from fp8jax.train.run_folder import RunMetadata
from fp8jax.train.step.network import Loss, RunState
from fp8jax.train.trainer import Trainer


class Fitted(NamedTuple):
    """The result of a run."""

    folder: pathlib.Path  # with report.html, unless the run was stopped
    state: RunState
    curves: Curves
    steps: int  # steps done; fewer than `max_steps` if the run was stopped
    twin: "Fitted | None" = None
    exit_status: int = 0  # for `sys.exit`: 130 if Ctrl-C stopped the run, 143 if SIGTERM did


def fit(
    trainer: Trainer,
    source: Source,
    *,
    twin: Trainer | None = None,
    transform: Callable[[Any], Any] | None = None,
    shuffle: bool = True,
    validation: Source | None = None,
    final_validation: Source | None = None,
    validation_loss: Loss | None = None,
    plain: PyTree = None,
    resume: bool = False,
    or_start: bool = False,
    about: Mapping[str, Any] | None = None,
    options: Any = None,
    callback: Callback | None = None,
) -> Fitted:
    """Trains until `max_steps`, and leaves a report in the folder of the run.

    Messages name options as flags of a command line: --or-start is `or_start`.

    Args:
        trainer: its configuration says how often to log, validate and save, and where to.
        source: rows by number, see `Loader`.
        twin: a trainer of another recipe, trained on the same batches for comparison.
        transform: row -> row, a pure function, of all sources.
        shuffle: a new order of `source` each epoch.
        validation: rows that are not trained on. All of them are evaluated every `eval_steps` steps and at
            the end; on several devices the last len(validation) % devices are left out. The loss is the mean
            over batches, weighted by their rows; the last batch may be smaller.
        final_validation: rows of the validation after the last step; by default those of `validation`.
        validation_loss: the loss of a validation, see `Trainer.evaluator`.
        plain: as in `Trainer.init`; a resumed run ignores it.
        resume: go on with the run in `output_dir`, or with the newest in runs/.
        or_start: `resume` begins at step 0 where there is no run, or all of its checkpoints are damaged.
        about: what else the report says, e.g. {"data": "the letters of Rilke"}: JSON values.
        options: a dataclass with fields made by `config.option`, the settings that the run keeps; by default
            the trainer's configuration.
        callback: called as `callback(step, name, metrics)` with each line of metrics.jsonl, in process 0: the
            steps done, the recipe, and name -> number. A resumed run repeats the lines after its checkpoint.

    Raises:
        BadInput: a ValueError: the folder holds another run, or a run and `resume` is not set, or none and it
            is; all checkpoints are damaged; rows do not fit the trainer, or fill no batch; the twin has the
            trainer's recipe, or other batches or devices; a process has other settings or data than process
            0; one of `validation` and `validation_loss` is missing, or both are and `final_validation` is
            given; JSON cannot hold `about`; `options` has a field `rows` or `of_twin`, which the run itself
            saves; or the extra `train` is not installed.
        Diverged: a `BadInput`: the last `max_skipped_steps` steps, or all, were skipped, because gradients
            were not finite; or the state has such numbers when it is to be saved. It is then not saved, and
            the report is written.
        OSError: a checkpoint or the report cannot be written; older checkpoints stay as they were.
    """
    begun, config = time.time(), trainer.config
    options = options or config
    with contextlib.ExitStack() as opened:
        requests = opened.enter_context(signals.stop_requests())
        with blame_input():
            for package in ("grain", "matplotlib", "rich"):
                need(package)  # before any work is done
            report.check_about(about or {}, trainer)
            settings = saved_options(options)
            checks.check_names(settings)
            settings[run_folder.ROWS] = trainer.rows
            if twin:
                checks.check_twin(twin, trainer)
                settings[run_folder.OF_TWIN] = checks.options_of_twin(twin.config, config)
            folder = run_folder.choose(config.output_dir, resume=resume, or_start=or_start, name="trainer")
            found = run_folder.read(folder, settings)
            examples = Examples(source, transform)
            first, last = (
                None if rows is None else Examples(rows, transform, name)
                for name, rows in (("validation", validation), ("final_validation", final_validation))
            )
            trainers = [trainer, *([twin] if twin else [])]
            for one in trainers:
                checks.check_rows(one, examples)
            held_out = first, first if last is None else last
            models = [Model(one, validator(one, held_out, validation_loss)) for one in trainers]
            now = RunMetadata(settings, checks.fingerprint([examples, first, last], found.data))
            checks.check_processes(now)
            run_folder.check_same(folder, found, now, fixed_options(type(options)))
            checks.check_batches(trainer, folder, found)
            batches = trainer.loader(source, transform, shuffle=shuffle)
            opened.enter_context(contextlib.closing(batches))
            models[0].is_measured = config.statistics and config.precision.is_quantized
            layers = [one.layers.splitlines()[0] for one in trainers]
            _ = trainer.kernels  # for the checkpoints; an error in the model shows now
            run_begins = opened.enter_context(run_folder.taken(folder, found, now))
            for line in layers:
                print(f"{line}; compiling", flush=True)
            run = Run(models, folder, (found if found.settings else now).digest, batches, examples, callback)
            run.begin(plain, resume, or_start)
        run_begins()
        resumed, data = run.steps, f"{len(source):,} rows of a {type(source).__name__}"

        def facts() -> dict[str, Any]:
            return {"data": data, **(about or {}), **report.facts(trainer, now.settings, begun, resumed)}

        stopped_by = _train(run, source, facts, requests)
    status = 128 + stopped_by if stopped_by else 0
    first, *second = (
        Fitted(folder, model.state, model.curves, run.steps, exit_status=status) for model in models
    )
    return first._replace(twin=second[0] if second else None)


def _train(
    run: Run, source: Source, facts: Callable[[], dict[str, Any]], requests: signals.StopRequests
) -> int:
    """Trains, and writes the report unless the run was stopped. Returns the signal that stopped it, or 0."""
    trainer, context = run.models[0].trainer, getattr(source, "context", None)  # of windows of a text
    is_text = isinstance(context, int)
    per_step = (trainer.rows * context, "tokens") if is_text else (trainer.rows, "rows")
    stopped_by, diverged = 0, None
    with requests.deferred():
        try:
            stopped_by = run.train(per_step, lambda: distributed.largest(requests.asked()))
        except Diverged as error:
            diverged = error
    if stopped_by:
        print(
            f"stopped and saved after step {run.steps} in {run.folder}; --resume goes on with it", flush=True
        )
    elif distributed.is_first():
        run.report(facts(), per_step, str(diverged or ""))
    if diverged:
        raise diverged
    return stopped_by
