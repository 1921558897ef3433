"""A transformer layer (layer.py), forward and backward, in each of the ways of ways.py.

Loss and gradients of all parameters and of the input, as inside a larger model. "bf16 /" is the speed
relative to bfloat16: the median over the rounds of the ratio of times. The ways that are judged are timed
first by themselves, so that they are there if time runs out; the others then take turns with all.
"""

import time
from collections.abc import Callable
from typing import Any

import clock
import jax
import layer
import output
import ways

from fp8jax.inspect import program
from on_gpu.notes import Given, Notes

BF16, FLAX = "bf16", "flax Fp8DotGeneral"
DELAYED, CURRENT = "fp8jax te", "fp8jax te,scaling=current"
WAYS = {**ways.WAYS, **ways.THROUGH_TE}
GROUPS = ((BF16, DELAYED, CURRENT, FLAX), tuple(ways.THROUGH_TE))
SHAPE = (layer.SEQUENCES, layer.TIME, layer.WIDTH)
TINY = (2, 16, 32)


def measure(given: Given, notes: Notes) -> None:
    """One table."""
    shape, heads = (TINY, 2) if given.tiny else (SHAPE, layer.HEADS)
    timers: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for number, names in enumerate(GROUPS):
        steps = {}
        for name in names:
            with notes.attempt(name):
                if reason := WAYS[name].why_not():
                    notes.skip(name, reason)
                else:
                    steps[name] = lowered(WAYS[name], shape, heads, given.attention)
        compiled = notes.compile_all({name: step.compile for name, (step, _) in steps.items()})
        for name, run in compiled.items():
            with notes.attempt(name):
                timers[name] = clock.timer(ready(run, *steps[name][1]))
                read = program.read(run)
                sizes = {"kernels": read.kernels, "temporaries GB": read.temporaries / 1e9}
                facts[name] = {**output.gemms(read), **sizes}
        if compiled:
            until = given.until if number else time.time() + given.left / 2
            times = clock.take_turns(timers, given.rounds, until)
            notes.table(f"transformer layer {shape}, loss and gradients", rows(times, facts))
            judge(times, notes)


def lowered(way: ways.Way, shape: Any, heads: int, attention: str) -> tuple[Any, Any]:
    """A way's step, to be compiled, and what it takes."""
    made, step = ways.loss_and_gradient(way, layer.stack(way, 1, heads, attention), input_too=True)
    x = jax.random.normal(jax.random.key(1), shape, way.dtype)
    variables = jax.jit(made.init)(jax.random.key(0), x)
    return jax.jit(step).lower(variables, x), (variables, x)


def ready(run: Any, variables: Any, x: Any) -> Callable[[], Any]:
    """The step with the scaling state as it is after a first one: amaxes have been seen."""
    state = "_overwrite_with_gradient"
    if state in variables:
        variables = {**variables, state: run(variables, x)[1][state]}
    return lambda: run(variables, x)


def rows(times: clock.Times, facts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a way."""
    return [
        {"way": name, **clock.row(times, name), "bf16 /": clock.ratio(times, BF16, name), **facts[name]}
        for name in times
    ]


def judge(times: clock.Times, notes: Notes) -> None:
    """The figures that targets are about."""
    notes.figure("layer delayed", clock.ratio(times, BF16, DELAYED))
    notes.figure("layer current", clock.ratio(times, BF16, CURRENT))
    over_flax = [clock.ratio(times, FLAX, name) for name in (DELAYED, CURRENT)]
    if all(over_flax):
        notes.figure("layer, flax /", min(filter(None, over_flax)))
