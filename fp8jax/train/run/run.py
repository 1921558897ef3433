"""A run of `fit` in progress: its models, its validations, and the steps between displays and checkpoints."""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fp8jax.inspect.numerics import OperandRow
from fp8jax.train import distributed, run_folder
from fp8jax.train.data.device import DevicePrefetch
from fp8jax.train.data.loader import Examples, Loader, Source
from fp8jax.train.metrics import Curves, MetricsWriter
from fp8jax.train.report import report
from fp8jax.train.report.outcome import outcome_of
from fp8jax.train.report.progress import Progress
from fp8jax.train.run import checks
from fp8jax.train.step.network import Loss, RunState
from fp8jax.train.step.unchanged_weights import unchanged_share
from fp8jax.train.trainer import Trainer

Callback = Callable[[int, str, Mapping[str, float]], None]


def spans(start: int, stop: int, *intervals: int) -> Iterator[tuple[int, int]]:
    """Cuts the steps from `start` to `stop` at every multiple of an interval."""
    while start < stop:
        end = min(stop, *((start // interval + 1) * interval for interval in intervals))
        yield start, end
        start = end


@dataclasses.dataclass
class Model:
    """One of the models of a run."""

    trainer: Trainer
    validate: Callable[..., float] | None
    state: PyTree = None
    curves: Curves = dataclasses.field(default_factory=Curves)
    batch: PyTree = None  # of the last step
    is_measured: bool = False  # whether its statistics are taken

    @property
    def name(self) -> str:
        """The recipe."""
        return str(self.trainer.config.precision)

    def bad_layer(self) -> str:
        """See `checks.bad_layer`."""
        return checks.bad_layer(self.trainer, self.state, self.batch)

    def measure(self) -> Sequence[OperandRow]:
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
class Run:
    """A run in progress."""

    models: list[Model]
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
            self.batches.restore(found.metadata["data"])
            self.saved = found.step
        for i, model in enumerate(self.models):
            model.state = found.state[i] if found else model.trainer.init(plain)
            if found:
                model.curves = Curves.from_json(found.metadata["curves"][i])
            if model.validate and self.steps < model.trainer.config.max_steps:
                for is_last in (False, True):  # an error in one of them shows now
                    model.validate(model.state, is_last=is_last, most=1)

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
                is_validated = end % config.eval_steps == 0 or end == last
                for model in self.models:
                    model.advance(batches, end - begin)
                    if model.validate and is_validated:
                        loss = model.validate(model.state, is_last=end == last)
                        model.curves.validation.append((end, loss))
                    if model.is_measured and is_validated:
                        rows = model.measure()
                        if rows and writer:
                            run_folder.write_statistics(self.folder, end, rows)
                    line = model.curves.line(end - begin, *per_step)
                    if writer:
                        writer.write(end, model.name, line)
                    if writer and self.callback:
                        self.callback(end, model.name, line)
                progress.show()
                for model in self.models:  # after all have advanced: a report compares their curves
                    recipe = model.trainer.config.precision
                    checks.check_trained(recipe, model.curves, most, self.examples, model.bad_layer)
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


def validator(
    trainer: Trainer,
    sources: tuple[Source | None, Source | None],
    loss: Loss | None,
) -> Callable[..., float] | None:
    """A function of a state, the mean loss of the first source, or after the last step of the second.

    It evaluates batches of a microbatch's rows on each device, at most `most`, and a smaller batch of the
    rows that are left, for which a second program is compiled. Up to devices - 1 rows are left out.
    """
    is_given = [each is not None for each in (*sources, loss)]
    if is_given[0] != is_given[2] or is_given == [False, True, False]:
        raise ValueError(
            "`validation` and `validation_loss` go together: rows, and the loss of them; `final_validation` "
            "needs both"
        )
    if loss is None:
        return None
    evaluate, devices = trainer.evaluator(loss), trainer.placement.mesh.size
    for name, source in zip(("validation", "final_validation"), sources, strict=True):
        if source is not None and len(source) < devices:
            raise ValueError(f"`{name}` has {len(source)} rows, fewer than the {devices} devices")

    def validate(state: RunState, *, is_last: bool = False, most: int | None = None) -> float:
        source: Any = sources[is_last]
        shared = len(source) // devices * devices
        rows = min(trainer.per_device * devices, shared)
        with Loader(source, batch=rows, seed=0, shuffle=False, epochs=1) as batches:
            # One after the other: a queue of batches would take the memory of the next step.
            losses = [float(evaluate(state, batch)) for batch in itertools.islice(batches, most)]
        weights = [rows] * len(losses)
        if rest := shared % rows:
            examples = Examples(source, None)
            last = [examples[i] for i in range(shared - rest, shared)]
            losses.append(float(evaluate(state, jax.tree.map(lambda *leaves: np.stack(leaves), *last))))
            weights.append(rest)
        return float(np.average(losses, weights=weights))

    return validate
