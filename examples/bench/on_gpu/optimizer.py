"""An optimizer step by itself: `tx.update` and `apply_updates` in one program, everything donated.

Large square leaves, gradients in the recipe's format, as in update.py; the reference is `optax.adamw` in
float32. "moved GB" is what the program's kernels read and write, the roofline of such a step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import update

from fp8jax.inspect import program
from on_gpu import clock
from on_gpu.notes import Given, Notes

LEAVES, SIZE = 24, 3840  # 354 million parameters
TINY = (2, 64)


def measure(given: Given, notes: Notes) -> None:
    """One table."""
    leaves, size = TINY if given.tiny else (LEAVES, SIZE)
    shapes, compiles = {}, {}
    for way in ("optax.adamw", "O2") if given.tiny else update.WAYS:
        tx, *shapes[way] = update.arguments(way, leaves, size)
        lowered = jax.jit(update.step_of(tx), donate_argnums=(0, 1)).lower(*shapes[way])
        compiles[way] = lowered.compile
    compiled = clock.compile_all(compiles, notes)
    timers = {way: clock.timer(loop(run, shapes[way])) for way, run in compiled.items()}
    times = clock.take_turns(timers, given.until, given.rounds)
    rows = []
    for way in times:
        read = program.read(compiled[way])
        found = {"/ optax.adamw": clock.ratio(times, way, update.OPTAX), "kernels": read.kernels}
        found |= {"moved GB": read.moved / 1e9, "TB/s": read.moved / clock.quartiles(times[way])[1] / 1e12}
        rows.append({"way": way, **clock.row(times, way), **found, "temporaries GB": read.temporaries / 1e9})
    notes.table(f"optimizer step, {leaves} leaves of {size} x {size}", rows)
    if found := clock.ratio(times, "O2", update.OPTAX):
        notes.figure("optimizer", found)


def loop(run: Any, shapes: Any) -> Callable[[], Any]:
    """A step that goes on from the one before."""
    # Codes of small numbers, with scale 1: a step's time does not depend on which.
    params, state, grads = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

    def step() -> Any:
        nonlocal params, state
        params, state = run(params, state, grads)
        return params

    return step
