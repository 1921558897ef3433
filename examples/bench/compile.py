"""Seconds to trace and compile a training step on this machine, for each way of multiplying.

    python examples/bench/compile.py
    python examples/bench/compile.py --rounds 5 --ways bf16 "fp8jax te"
    python examples/bench/compile.py --json

Two programs of a transformer with 6 blocks that are not scanned, width 128: loss and gradients, and with
the optimizer's step (Adam; fp8jax's own for fp8jax). Every sample is a process of its own, since what one
compiled makes the next one faster; the ways take turns; figures are medians, and "/ bf16" compares within
this one run.
"""

import argparse
import concurrent.futures
import multiprocessing
import statistics
import time
from typing import Any

import output
import ways

PROGRAMS = ("loss and gradients", "whole step")
DEFAULT = ("float32", "bf16", "flax Fp8DotGeneral", "fp8jax te", "fp8jax O2")


def sample(way_name: str, program: str, layers: int) -> list[float]:
    """Seconds to trace, to lower and to compile."""
    import jax
    import jax.numpy as jnp
    import optax
    from step import Sizes, Transformer

    import fp8jax

    way = ways.WAYS[way_name]
    sizes = Sizes(layers=layers, width=128, heads=4, batch=4, context=64)
    model, gradients = ways.loss_and_gradient(way, Transformer(way.dense, way.dtype, sizes))
    x = jax.ShapeDtypeStruct((sizes.batch, sizes.context, sizes.width), way.dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    is_ours = way_name.startswith("fp8jax")
    tx = fp8jax.optim.adamw(1e-3, way_name.split()[1]) if is_ours else optax.adamw(1e-3)

    def whole(variables: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = gradients(variables, x)
        updates, opt_state = tx.update(grads, opt_state, variables)
        apply = fp8jax.apply_updates if is_ours else optax.apply_updates
        return loss, apply(variables, updates), opt_state

    step, args = gradients, (variables, x)
    if program == "whole step":
        step, args = whole, (variables, jax.eval_shape(tx.init, variables), x)
    jax.jit(jnp.sin).lower(1.0).compile()  # what the first compilation of a process costs is nobody's
    times = [time.perf_counter()]
    traced = jax.jit(step).trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return [end - begin for begin, end in zip(times, times[1:], strict=False)]


def rows(names: list[str], program: str, rounds: int, layers: int) -> list[dict[str, Any]]:
    """One row per way."""
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    fresh = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for name in names:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as process:
                samples[name].append(process.submit(sample, name, program, layers).result())
    medians = {name: [statistics.median(part) for part in zip(*samples[name], strict=True)] for name in names}
    totals = {name: statistics.median(map(sum, samples[name])) for name in names}
    return [
        {
            "way": name,
            **dict(zip(("trace s", "lower s", "compile s"), medians[name], strict=True)),
            "total s": totals[name],
            **{f"/ {plain}": totals[name] / totals[plain] for plain in ("float32", "bf16") if plain in names},
        }
        for name in names
    ]


def main() -> None:
    """Measures both programs, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="samples of each way")
    parser.add_argument("--ways", nargs="+", default=list(DEFAULT), choices=list(ways.WAYS), metavar="WAY")
    output.add_options(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    rounds, layers = (1, 1) if args.tiny else (args.rounds, 6)
    sections = {program: rows(args.ways, program, rounds, layers) for program in PROGRAMS}
    output.finish("compile", output.cpu_name(), sections, args)


if __name__ == "__main__":
    main()
