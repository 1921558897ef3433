"""GPT-124M learns in bfloat16 and at O2, from the same weights and on the same batches, while time allows.

The levels take turns of a few steps, so they end with equal steps. The second turn's time decides the number
of steps, at whose end the cosine reaches its minimum. Tokens are bytes of --data, or of the source of
Python's standard library.
"""

import functools
import pathlib
import sysconfig
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from on_gpu import gpt
from on_gpu.notes import Given, Notes

LEVELS = ("bf16", "O2")
TURN, TURN_TINY = 20, 2  # steps
VALIDATIONS = 8  # in a run
BATCHES, BATCHES_TINY = 16, 2  # of a validation
TRAINING, VALIDATION, SHARE = 0, 1, 0.9
MOST_STEPS, MOST_STEPS_TINY = 20_000, 6
LIBRARY_BYTES = 20_000_000


class Run:
    """One level's training."""

    def __init__(self, step: Any, loss: Any, state: Any) -> None:
        self.run_step, self.run_loss, self.state = step, loss, state
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []

    def advance(self, batches: list[Any], total: float) -> float:
        """One step per batch; returns the seconds."""
        begun, losses = time.time(), []
        for batch in batches:
            self.state, loss = self.run_step(self.state, batch, jnp.float32(total))
            losses.append(loss)
        self.losses += [float(loss) for loss in jax.device_get(losses)]
        return time.time() - begun

    def validate(self, batches: list[Any]) -> None:
        """The mean loss of the batches."""
        losses = jax.device_get([self.run_loss(self.state[0], batch) for batch in batches])
        self.validation.append((len(self.losses), float(np.mean(losses, dtype=np.float64))))


def measure(given: Given, notes: Notes) -> None:
    """One table, and the curves."""
    size = gpt.size_of("GPT-124M", given)
    text = text_of(given.data)
    parts = np.split(text, [int(SHARE * len(text))])
    runs = prepared(size, given, notes)
    count = BATCHES_TINY if given.tiny else BATCHES
    held_out = [jnp.asarray(gpt.batch_of(parts[1], (VALIDATION, n), size)) for n in range(count)]
    turn, most = (TURN_TINY, MOST_STEPS_TINY) if given.tiny else (TURN, MOST_STEPS)
    done, total, reserve = 0, float(most), 0.0
    while done < total:
        batches = [jnp.asarray(gpt.batch_of(parts[0], (TRAINING, done + n), size)) for n in range(turn)]
        seconds = sum(run.advance(batches, total) for run in runs.values())
        done += turn
        if done == 2 * turn:  # the first turn warmed up; this one tells how many there is time for
            begun = time.time()
            for run in runs.values():
                run.validate(held_out)
            reserve = 1.5 * (time.time() - begun)
            turns = int((given.left - VALIDATIONS * reserve) / (1.1 * seconds))
            total = float(min(most, done + turn * max(turns, 1)))
        elif done < total and done % (turn * max(1, round(total / turn / VALIDATIONS))) == 0:
            for run in runs.values():
                run.validate(held_out)
            write(runs, size, notes)
        if done > 2 * turn and given.left < reserve + seconds:
            break
    for run in runs.values():
        run.validate(held_out)
    write(runs, size, notes)


def prepared(size: gpt.Size, given: Given, notes: Notes) -> dict[str, Run]:
    """Both levels, compiled, with the first state of the same weights."""
    learners = {level: gpt.Learner(size, level, given.attention) for level in LEVELS}
    every = [(level, what) for level in LEVELS for what in ("init", "step", "loss")]
    calls = {each: functools.partial(gpt.compiled, learners[each[0]], each[1]) for each in every}
    done = notes.compile_all(calls)
    return {
        level: Run(done[level, "step"], done[level, "loss"], done[level, "init"](jax.random.key(0)))
        for level in LEVELS
    }


def write(runs: dict[str, Run], size: gpt.Size, notes: Notes) -> None:
    """Keeps the losses so far."""
    rows = []
    for level, run in runs.items():
        step, loss = run.validation[-1]
        gap = loss - runs[LEVELS[0]].validation[-1][1]
        every = max(1, len(run.losses) // 500)
        means = [float(np.mean(run.losses[at : at + every])) for at in range(0, len(run.losses), every)]
        notes.add("curves", f"{level} training", [(every * (n + 1), loss) for n, loss in enumerate(means)])
        notes.add("curves", f"{level} validation", run.validation)
        rows.append({"level": level, "steps": step, "validation loss": loss, f"- {LEVELS[0]}": gap})
    notes.table(f"GPT-124M, {size.batch} x {size.context} bytes a step", rows)
    notes.figure("convergence", rows[1][f"- {LEVELS[0]}"])


def text_of(path: str) -> np.ndarray:
    """A text's bytes."""
    if path:
        return np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
    folder, pieces, length = pathlib.Path(sysconfig.get_path("stdlib")), [], 0
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" not in file.parts and length < LIBRARY_BYTES:
            pieces.append(file.read_bytes())
            length += len(pieces[-1])
    if not pieces:
        raise ValueError(f"this Python keeps no source of its standard library in {folder}; give --data FILE")
    return np.frombuffer(b"".join(pieces), np.uint8)
