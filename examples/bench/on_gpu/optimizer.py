"""An optimizer step by itself: `tx.update` and `apply_updates` in one program, everything donated.

Large square leaves, gradients in the recipe's format, as in update.py; the reference is `optax.adamw` in
float32. "moved GB" is what the program's kernels read and write, the roofline of such a step.
"""

import clock
import jax
import update

from fp8jax.inspect import program
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
    compiled = notes.compile_all(compiles)
    timers = {way: clock.timer(update.loop(run, shapes[way])) for way, run in compiled.items()}
    times = clock.take_turns(timers, given.rounds, given.until)
    rows = []
    for way in times:
        read = program.read(compiled[way])
        found = {"/ optax.adamw": clock.ratio(times, way, update.OPTAX), "kernels": read.kernels}
        found |= {"moved GB": read.moved / 1e9, "TB/s": read.moved / clock.quartiles(times[way])[1] / 1e12}
        rows.append({"way": way, **clock.row(times, way), **found, "temporaries GB": read.temporaries / 1e9})
    notes.table(f"optimizer step, {leaves} leaves of {size} x {size}", rows)
    notes.figure("optimizer", clock.ratio(times, "O2", update.OPTAX))
