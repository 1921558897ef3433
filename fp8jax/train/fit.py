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
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from fp8jax import signals
from fp8jax.inspect.numerics import Row
from fp8jax.train import checks, distributed, run_folder
from fp8jax.train.config import fixed_options, saved_options
from fp8jax.train.data.device import DevicePrefetch
from fp8jax.train.data.loader import Examples, Source
from fp8jax.train.errors import Diverged, blame_input, need
from fp8jax.train.metrics import Curves, MetricsWriter
from fp8jax.train.report import report
from fp8jax.train.report.outcome import outcome_of
from fp8jax.train.report.progress import Progress
from fp8jax.train.run_folder import RunMetadata
from fp8jax.train.step.network import Loss, State
from fp8jax.train.step.unchanged_weights import unchanged_share
from fp8jax.train.trainer import Trainer
from fp8jax.train.validation import validator

Callback = Callable[[int, str, Mapping[str, float]], None]


class Fitted(NamedTuple):
    """The result of a run."""

    folder: pathlib.Path  # with report.html, unless the run was stopped
    state: State
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
        validation: rows that are not trained on. Every `eval_steps` steps and at the end, the same batches of
            them are evaluated, all but the last few rows that fill no batch; a thread reads them.
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
            is; all checkpoints are damaged; rows do not fit the trainer, or fill no batch; one of
            `validation` and `validation_loss` is missing; JSON cannot hold `about`; or the extra `train` is
            not installed.
        Diverged: a `BadInput`: the last `max_skipped_steps` steps, or all, were skipped, because gradients
            were not finite; or the state has such numbers when it is to be saved. It is then not saved, and
            the report is written.
        OSError: a checkpoint or the report cannot be written; older checkpoints stay as they were.
    """
    begun = time.time()
    trainers, config = [trainer, *([twin] if twin else [])], trainer.config
    options = options or config
    with contextlib.ExitStack() as opened:
        requests = opened.enter_context(signals.stop_requests())
        with blame_input():
            for package in ("grain", "matplotlib", "rich"):
                need(package)  # before any work is done
            report.check_about(about or {}, trainer)
            if twin and twin.config.precision == config.precision:
                raise ValueError(f"`twin`: expected another recipe; both are {config.precision}")
            kept = {**saved_options(options), "rows": trainer.rows}
            folder = run_folder.choose(config.output_dir, resume=resume, or_start=or_start, name="trainer")
            found = run_folder.read(folder, kept)
            examples = Examples(source, transform)
            checks.check_rows(trainer, examples, folder, found)
            now = RunMetadata(kept, examples.fingerprint())
            run_folder.check_same(folder, found, now, fixed_options(type(options)))
            batches = trainer.loader(source, transform, shuffle=shuffle)
            opened.enter_context(contextlib.closing(batches))
            sources = validation, validation if final_validation is None else final_validation
            models = [_Model(one, validator(one, sources, transform, validation_loss)) for one in trainers]
            models[0].is_measured = config.statistics and config.precision.is_quantized
            layers = [one.layers.splitlines()[0] for one in trainers]
            _ = trainer.kernels  # for the checkpoints; an error in the model shows now
            run_begins = opened.enter_context(run_folder.taken(folder, found, now))
            for line in layers:
                print(f"{line}; compiling", flush=True)
            run = _Run(models, folder, (found if found.settings else now).digest, batches, examples, callback)
            run.begin(plain, resume, or_start)
        run_begins()
        resumed = run.steps
        context = getattr(source, "context", None)  # of windows of a text
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
                f"stopped and saved after step {run.steps} in {folder}; --resume goes on with it", flush=True
            )
        elif distributed.is_first():
            data = f"{len(source):,} rows of a {type(source).__name__}"
            run.report(
                {"data": data, **(about or {}), **report.facts(trainer, now.settings, begun, resumed)},
                per_step,
                str(diverged or ""),
            )
        if diverged:
            raise diverged
    status = 128 + stopped_by if stopped_by else 0
    first, *second = (
        Fitted(folder, model.state, model.curves, run.steps, exit_status=status) for model in models
    )
    return first._replace(twin=second[0] if second else None)


def spans(start: int, stop: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """Cuts the steps from `start` to `stop` at every multiple of an interval."""
    while start < stop:
        end = min(stop, *((start // interval + 1) * interval for interval in intervals))
        yield start, end
        start = end


@dataclasses.dataclass
class _Model:
    """One of the models of a run."""

    trainer: Trainer
    validate: Callable[..., float] | None
    state: PyTree = None
    curves: Curves = dataclasses.field(default_factory=Curves)
    batch: PyTree = None  # of the last step
    is_measured: bool = False  # whether its statistics are taken

    @property
    def name(self) -> str:
        return str(self.trainer.config.precision)

    def bad_layer(self) -> str:
        """See `checks.bad_layer`."""
        return checks.bad_layer(self.trainer, self.state, self.batch)

    def measure(self) -> tuple[Row, ...]:
        """Statistics of the newest batch, see `Trainer.statistics`; () if they cannot be taken, and no more
        are then: a run does not end for them."""
        try:
            rows = self.trainer.statistics(self.state, self.batch).rows
        except Exception as error:
            self.is_measured, rows = False, ()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            distributed.warn(f"{self.name}: from here on no statistics of its operands: {reason}")
        if rows:
            shares = {f"{row.name} {row.operand}": row.underflow for row in rows if row.is_own}
            self.curves.underflow.append((len(self.curves.loss), shares))
        return rows

    def advance(self, batches: Any, count: int) -> None:
        """Does a step for each of `count` batches, and waits for the devices only at the end."""
        steps, begun, sample, before = [], time.perf_counter(), self.trainer.sample, None
        for number, batch in enumerate(batches, 1):
            if sample and number == count:
                before = sample(self.state)
            self.state, of_step = self.trainer.step(self.state, batch)
            self.batch = batch
            steps.append(of_step)
        unchanged = unchanged_share(before, sample(self.state)) if sample and before else None
        self.curves.add(jax.device_get(steps), time.perf_counter() - begun, unchanged)


@dataclasses.dataclass
class _Run:
    """A run in progress."""

    models: list[_Model]
    folder: pathlib.Path
    digest: str
    batches: DevicePrefetch
    examples: Examples
    callback: Callback | None
    saved: int | None = None  # the step of the newest checkpoint

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.models[0].curves.loss)

    def begin(self, plain: PyTree, resume: bool, or_start: bool) -> None:
        """Compiles, and restores the newest checkpoint or makes the first states."""
        for model in self.models:
            model.trainer.check_memory()
            _ = model.trainer.program, model.trainer.sample
        distributed.wait_for_all()  # compiling takes some processes longer than gloo waits for them
        like = [model.trainer.like for model in self.models]
        found = run_folder.restore(self.folder, like, self.digest, or_start) if resume else None
        if found:
            checks.check_metadata(self.folder, found, len(self.models))
            self.batches.restore(found.metadata["data"])
            self.saved = found.step
        for i, model in enumerate(self.models):
            model.state = found.state[i] if found else model.trainer.init(plain)
            if found:
                model.curves = Curves.from_json(found.metadata["curves"][i])
            if model.validate and self.steps < model.trainer.config.max_steps:
                model.validate(model.state, most=1)  # an error in it shows now

    def save(self) -> None:
        """Writes a checkpoint, unless this step has one. Raises Diverged for a state that is not finite."""
        if self.steps == self.saved:
            return
        for model in self.models:
            bad = checks.bad_arrays(model.trainer, model.state)
            checks.check_finite(model.name, model.curves, bad, self.saved)
        curves = [model.curves.to_json() for model in self.models]
        kernels = {
            "/".join(map(str, path)): k.to_json() for path, k in self.models[0].trainer.kernels.items()
        }
        metadata = {"data": self.batches.state(), "curves": curves, "kernels": kernels}
        run_folder.save(
            self.folder, self.steps, [model.state for model in self.models], metadata, self.digest
        )
        self.saved = self.steps

    def train(self, per_step: tuple[int, str], stop_asked: Callable[[], int]) -> int:
        """Trains until the last step, or until asked to stop; returns the signal that asked, else 0."""
        config = self.models[0].trainer.config
        last, most = config.max_steps, min(config.max_skipped_steps, config.max_steps)
        intervals = (config.logging_steps, config.eval_steps, config.save_steps)
        if self.steps < last:
            self.batches.read_ahead()  # workers take seconds to start
        curves = {model.name: model.curves for model in self.models}
        writing = contextlib.nullcontext()
        if distributed.is_first():
            writing = contextlib.closing(MetricsWriter(self.folder, self.steps))
            run_folder.remove_statistics(self.folder, self.steps)
        with Progress(curves, last, *per_step) as progress, writing as writer:
            for begin, end in spans(self.steps, last, *intervals):
                if number := stop_asked():
                    self.save()
                    return number
                batches: Any = itertools.islice(self.batches, end - begin)
                if len(self.models) > 1:
                    batches = list(batches)
                for model in self.models:
                    model.advance(batches, end - begin)
                    if model.validate and (end % config.eval_steps == 0 or end == last):
                        loss = model.validate(model.state, is_last=end == last)
                        model.curves.validation.append((end, loss))
                    if model.is_measured and (end % config.eval_steps == 0 or end == last):
                        rows = model.measure()
                        if rows and writer:
                            run_folder.write_statistics(self.folder, end, rows)
                    line = model.curves.line(end - begin, *per_step)
                    if writer:
                        writer.write(end, model.name, line)
                    if writer and self.callback:
                        self.callback(end, model.name, line)
                    checks.check_trained(model.name, model.curves, most, self.examples, model.bad_layer)
                progress.show()
                if end % config.save_steps == 0 or end == last:
                    self.save()
        return 0

    def report(self, about: dict[str, Any], per_step: tuple[int, str], diverged: str) -> None:
        """Writes the report and prints its table; `diverged` is the error of a run that ends with one."""
        outcomes = {
            model.name: outcome_of(model.trainer, model.state, model.curves, per_step)
            for model in self.models
        }
        page = report.write(self.folder, about, outcomes, diverged)
        report.show(outcomes)
        print(f"report: {page}", flush=True)
