"""Seconds to trace, lower and compile a training step, for each way of computing dense layers.

    python examples/bench/compile.py
    python examples/bench/compile.py --rounds 5 --ways bf16 "fp8jax te"
    python examples/bench/compile.py --target h200 --layers 24 --rounds 1
    python examples/bench/compile.py --json

Two programs of a transformer with 6 blocks that are not scanned, width 128: loss and gradients, and with the
optimizer's step (Adam; fp8jax's for fp8jax). Each sample is a process of its own, since one compilation makes
the next one faster. The ways take turns; figures are medians, and "/ bf16" compares within this run.
`--target` compiles for a GPU that is not here (needs `fp8jax install-compiler`), without its autotuning.
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


def sample(name: str, program: str, layers: int, target: str | None) -> list[float]:
    """Seconds to trace and lower, and to compile."""
    import jax
    import jax.numpy as jnp
    import optax
    from layer import stack

    import fp8jax
    from fp8jax.inspect import targets

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
    targets.compile_for(jnp.sin, 1.0, target=target)  # the first compilation of a process does not count
    begin = time.perf_counter()
    lowered = targets.lower_for(step, *args, target=target)
    middle = time.perf_counter()
    targets.compile(lowered, target)
    return [middle - begin, time.perf_counter() - middle]


def rows(names: list[str], program: str, rounds: int, layers: int, target: str | None) -> output.Rows:
    """One row per way."""
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    fresh = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for name in names:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as process:
                samples[name].append(process.submit(sample, name, program, layers, target).result())
    totals = {name: statistics.median(map(sum, samples[name])) for name in names}
    found = []
    for name in names:
        medians = map(statistics.median, zip(*samples[name], strict=True))
        row = {"way": name, **dict(zip(("lower s", "compile s"), medians, strict=True))}
        references = [plain for plain in ("float32", "bf16") if plain in names]
        ratios = {f"/ {plain}": totals[name] / totals[plain] for plain in references}
        found.append({**row, "total s": totals[name], **ratios})
    return found


def main() -> None:
    """Measures both programs, prints."""
    tiny, choices = {"rounds": 1, "layers": 1}, {"ways": ways.WAYS}
    args = output.parse(__doc__, tiny=tiny, choices=choices, rounds=3, layers=6, target="", ways=DEFAULT)
    how = args.rounds, args.layers, args.target or None
    sections = {program: rows(args.ways, program, *how) for program in PROGRAMS}
    output.finish("compile", args.target or output.cpu_name(), sections, args)


if __name__ == "__main__":
    main()
