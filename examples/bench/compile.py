"""Seconds to trace and compile a training step on this machine, for each way of computing dense layers.

    python examples/bench/compile.py
    python examples/bench/compile.py --rounds 5 --ways bf16 "fp8jax te"
    python examples/bench/compile.py --json

Two programs of a transformer with 6 blocks that are not scanned, width 128: loss and gradients, and with the
optimizer's step (Adam; fp8jax's for fp8jax). Each sample is a process of its own, since one compilation makes
the next one faster. The ways take turns; figures are medians, and "/ bf16" compares within this run.
"""

import concurrent.futures
import multiprocessing
import statistics
import time
from typing import Any

import output
import ways

PROGRAMS = ("loss and gradients", "whole step")
DEFAULT = ["float32", "bf16", "flax Fp8DotGeneral", "fp8jax te", "fp8jax O2"]


def sample(name: str, program: str, layers: int) -> list[float]:
    """Seconds to trace, to lower and to compile."""
    import jax
    import jax.numpy as jnp
    import optax
    from layer import stack

    import fp8jax

    way = ways.WAYS[name]
    model, gradients = ways.loss_and_gradient(way, stack(way, layers, heads=4))
    variables, x = ways.shapes(way, model, (4, 64, 128))
    is_ours = name.startswith("fp8jax")
    tx = fp8jax.optim.adamw(1e-3, name.split()[1]) if is_ours else optax.adamw(1e-3)

    def whole(variables: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = gradients(variables, x)
        updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
        return loss, {**grads, "params": optax.apply_updates(variables["params"], updates)}, opt_state

    step, args = gradients, (variables, x)
    if program == "whole step":
        step, args = whole, (variables, jax.eval_shape(tx.init, variables["params"]), x)
    jax.jit(jnp.sin).lower(1.0).compile()  # the first compilation of a process does not count
    times = [time.perf_counter()]
    traced = jax.jit(step).trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return [end - begin for begin, end in zip(times, times[1:], strict=False)]


def rows(names: list[str], program: str, rounds: int, layers: int) -> output.Rows:
    """One row per way."""
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    fresh = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for name in names:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as process:
                samples[name].append(process.submit(sample, name, program, layers).result())
    totals = {name: statistics.median(map(sum, samples[name])) for name in names}
    found = []
    for name in names:
        medians = map(statistics.median, zip(*samples[name], strict=True))
        row = {"way": name, **dict(zip(("trace s", "lower s", "compile s"), medians, strict=True))}
        references = [plain for plain in ("float32", "bf16") if plain in names]
        ratios = {f"/ {plain}": totals[name] / totals[plain] for plain in references}
        found.append({**row, "total s": totals[name], **ratios})
    return found


def main() -> None:
    """Measures both programs, prints."""
    args = output.parse(__doc__, tiny={"rounds": 1}, choices={"ways": ways.WAYS}, rounds=3, ways=DEFAULT)
    layers = 1 if args.tiny else 6
    sections = {program: rows(args.ways, program, args.rounds, layers) for program in PROGRAMS}
    output.finish("compile", output.cpu_name(), sections, args)


if __name__ == "__main__":
    main()
