"""A train step of a GPT at every level of the chart: tokens per second, memory, and the update's time.

"planned GB" is XLA's sum for the compiled step: state, batch, results and temporaries. "peak GB" is the
allocator's peak during a level's first step, less the bytes in use before its state. The allocator's peak
never falls, so "peak GB" is "-" where the step did not raise it.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import clock
import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.inspect import program
from on_gpu import gpt
from on_gpu.notes import Given, Notes

# The levels that are judged, then the others.
GROUPS = (("bf16", "O2"), ("te", "O1", "O3", "fp16_amp"))
PROGRAMS = ("init", "step", "update")
BASELINE, JUDGED_LEVEL, JUDGED_SIZE = "bf16", "O2", "GPT-350M"


def measure(given: Given, notes: Notes, name: str) -> None:
    """One table for the size of this name."""
    size = gpt.size_of(name, given)
    turns: dict[str, Callable[[], float]] = {}
    facts: dict[str, dict[str, Any]] = {}
    took = 0.0
    for number, levels in enumerate(GROUPS[:1] if given.tiny else GROUPS):
        if given.left < 2 * took:
            notes.skip(f"{name}: {', '.join(levels)}", "no time was left to compile them")
            break
        begun = time.time()
        learners = [gpt.Learner(size, level, given.attention) for level in levels]
        for learner, programs in compiled(learners, notes).items():
            with notes.attempt(f"{name}, {(level := learner.level)}"):
                steps = Steps(learner, *programs)
                facts[level] = steps.facts
                turns[level], turns[f"{level} update"] = map(clock.timer, (steps.step, steps.update))
        took = time.time() - begun
        if turns:
            until = given.until if number else time.time() + given.left / 3
            times = clock.take_turns(turns, given.rounds, until)
            notes.table(f"{name}, train step, {size.batch} x {size.context} tokens", rows(times, facts, size))
            judge(name, times, facts, notes)


def compiled(learners: list[gpt.Learner], notes: Notes) -> dict[gpt.Learner, list[Any]]:
    """The programs of each: first state, step, update."""
    every = [(learner, what) for learner in learners for what in PROGRAMS]
    names = [f"{learner.level} {what}" for learner, what in every]
    calls = (functools.partial(gpt.compiled, *each) for each in every)
    done = notes.compile_all(dict(zip(names, calls, strict=True)))
    found = {each: [done.get(f"{each.level} {what}") for what in PROGRAMS] for each in learners}
    return {learner: programs for learner, programs in found.items() if all(programs)}


class Steps:
    """A level's steps, each going on from the one before, and what the first one needed."""

    def __init__(self, learner: gpt.Learner, init: Any, step: Any, update: Any) -> None:
        self.total, self.run, self.run_update = jnp.float32(1000), step, update
        _, batch, grads = gpt.shapes_of(learner)
        numbers = np.random.default_rng(0).integers(learner.size.vocabulary, size=batch.shape)
        self.batch = jnp.asarray(numbers, jnp.int32)
        in_use, peak = memory()
        self.state = init(jax.random.key(0))
        loss = float(self.step())
        after = memory()[1]
        # Only now: they are no part of a step.
        self.grads = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), grads)
        read = program.read(step)
        self.facts = {
            "planned GB": read.total / 1e9,
            "peak GB": (after - in_use) / 1e9 if after > peak else None,
            "FP8 GEMMs": read.count("cublaslt_f8"),
            "kernels": read.kernels,
            "first loss": loss,
        }

    def step(self) -> Any:
        """A whole step; returns its loss."""
        self.state, loss = self.run(self.state, self.batch, self.total)
        return loss

    def update(self) -> Any:
        """The optimizer's part alone; returns what to wait for."""
        self.state = self.run_update(self.state, self.grads, self.total)
        return self.state


def memory() -> tuple[int, int]:
    """Bytes that the device's allocator has given out, now and at most; 0 where it does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use", 0)


def rows(times: clock.Times, facts: dict[str, dict[str, Any]], size: gpt.Size) -> list[dict[str, Any]]:
    """One row a level."""
    tokens = size.batch * size.context
    return [
        {
            "level": level,
            **clock.row(times, level),
            "tokens/s": round(tokens / clock.quartiles(times[level])[1]),
            f"{BASELINE} /": clock.ratio(times, BASELINE, level),
            "update ms": 1e3 * clock.quartiles(times[f"{level} update"])[1],
            **facts[level],
        }
        for level in facts
        if f"{level} update" in times
    ]


def judge(name: str, times: clock.Times, facts: dict[str, dict[str, Any]], notes: Notes) -> None:
    """The figures that targets are about: memory as measured, or as planned where it is not."""
    if name != JUDGED_SIZE or not {BASELINE, JUDGED_LEVEL} <= facts.keys():
        return
    notes.figure("train step speed", clock.ratio(times, BASELINE, JUDGED_LEVEL))
    own, base = facts[JUDGED_LEVEL], facts[BASELINE]
    kind = "peak GB" if own["peak GB"] and base["peak GB"] else "planned GB"
    notes.figure("train step memory", own[kind] / base[kind])
