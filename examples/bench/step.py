"""Time, compile time and memory of one training step on this machine, for each way of computing dense layers.

    python examples/bench/step.py
    python examples/bench/step.py --rounds 20 --ways bf16 "fp8jax O2"
    python examples/bench/step.py --json
    python examples/bench/step.py --record examples/records

Loss and all gradients of a transformer: 4 layers, width 512, 8 heads, 2048 tokens, no rematerialization, and
with `--input-gradient 1` also the gradient of its input, as inside a larger model. The ways take turns; times
are medians over the rounds, and "/ bf16" compares within this run. "total" counts arguments and outputs, too:
XLA computes in the outputs' buffers, so a way with small gradients needs more temporaries. The ways of
TransformerEngine need a GPU. On a GPU the ways are compiled side by side, and `--profile FOLDER` adds the
time of each kernel.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import clock
import jax
import kernels
import output
import ways
from layer import attention, stack

from fp8jax.inspect import program

WAYS = {**ways.WAYS, **ways.IN_BLOCKS, **ways.THROUGH_TE}
FLAX = "flax Fp8DotGeneral"
STATE = "_overwrite_with_gradient"


def prepare(name: str, args: argparse.Namespace) -> tuple[Callable[[], Any], float, program.CompiledProgram]:
    """A step after the first, when scales are known; the seconds to compile it; and the program."""
    way = WAYS[name]
    model = stack(way, args.layers, args.heads, attention())
    made, step = ways.loss_and_gradient(way, model, input_too=bool(args.input_gradient))
    x = jax.random.normal(jax.random.key(1), (args.batch, args.context, args.width), way.dtype)
    variables = jax.jit(made.init)(jax.random.key(0), x)
    start = time.perf_counter()
    compiled = jax.jit(step).lower(variables, x).compile()
    seconds = time.perf_counter() - start
    if STATE in variables:
        variables = {**variables, STATE: compiled(variables, x)[1][STATE]}
    return lambda: compiled(variables, x), seconds, program.read(compiled)


def rows(args: argparse.Namespace, skipped: dict[str, str], runs: dict[str, Any]) -> output.Rows:
    """One row per way; the steps go into `runs`."""
    turns, facts = {}, {}

    def prepared(name: str) -> Any:
        try:
            reason = WAYS[name].why_not()
            return reason or prepare(name, args)
        except Exception as error:  # of a library that is compared; the others are measured
            return output.first_line(error)

    for name, ready in zip(args.ways, output.side_by_side(prepared, args.ways), strict=True):
        try:
            if isinstance(ready, str):
                skipped[name] = ready
                continue
            runs[name], *facts[name] = ready
            turns[name] = clock.timer(runs[name], least_s=clock.LEAST_S_OF_NEW)
        except Exception as error:
            skipped[name] = output.first_line(error)
    times = clock.take_turns(turns, args.rounds)
    bf16 = facts["bf16"][1] if "bf16" in turns else None
    found = []
    for name in turns:
        compile_s, read = facts[name]
        found.append(
            {
                "way": name,
                "step ms": clock.row(times, name)["ms"],
                "/ bf16": clock.ratio(times, name, "bf16"),
                "/ flax": clock.ratio(times, name, FLAX),
                "fastest ms": 1e3 * min(times[name]),
                "compile s": compile_s,
                **output.gemms(read),
                "kernels": read.kernels,
                "temporaries MB": read.temporaries / 1e6,
                "/ bf16 ": read.temporaries / bf16.temporaries if bf16 else None,
                "total MB": read.total / 1e6,
                "/ bf16  ": read.total / bf16.total if bf16 else None,
            }
        )
    return found


def main() -> None:
    """Measures and prints."""
    sizes = {"layers": 4, "width": 512, "heads": 8, "batch": 8, "context": 256}
    tiny = {"layers": 1, "width": 32, "heads": 2, "batch": 2, "context": 16}
    args = output.parse(
        __doc__,
        tiny={**tiny, "rounds": 1},
        choices={"ways": WAYS},
        rounds=10,
        ways=list(ways.WAYS),
        input_gradient=0,
        profile="",
        **sizes,
    )
    skipped: dict[str, str] = {}
    shape = ", ".join(f"{name} {getattr(args, name)}" for name in sizes)
    runs: dict[str, Any] = {}
    sections = {f"{output.device()}, {shape}, {args.rounds} rounds": rows(args, skipped, runs)}
    output.finish("step", output.device(), sections, args, skipped=skipped)
    kernels.add("step", runs, sections, args, skipped)


if __name__ == "__main__":
    main()
