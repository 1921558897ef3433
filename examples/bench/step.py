"""Time, compile time and memory of one training step on this machine, for each way of computing dense layers.

    python examples/bench/step.py
    python examples/bench/step.py --rounds 20 --ways bf16 "fp8jax O2"
    python examples/bench/step.py --json
    python examples/bench/step.py --record examples/records

Loss and all gradients of a transformer: 4 layers, width 512, 8 heads, 2048 tokens, no rematerialization. The
ways take turns; times are medians over the rounds, and "/ bf16" compares within this run. "total" counts
arguments and outputs, too: XLA computes in the outputs' buffers, so a way with small gradients needs more
temporaries.
"""

import statistics
import time
from typing import NamedTuple

import clock
import jax
import output
import ways
from layer import stack

from fp8jax.inspect import program


class Sizes(NamedTuple):
    """Sizes of the model and its input."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    batch: int = 8
    context: int = 256


TINY = Sizes(layers=1, width=32, heads=2, batch=2, context=16)


def rows(names: list[str], sizes: Sizes, rounds: int) -> output.Rows:
    """One row per way."""
    turns, facts = {}, {}
    for name in names:
        way = ways.WAYS[name]
        model, step = ways.loss_and_gradient(way, stack(way, sizes.layers, sizes.heads))
        x = jax.random.normal(jax.random.key(1), (sizes.batch, sizes.context, sizes.width), way.dtype)
        variables = jax.jit(model.init)(jax.random.key(0), x)
        start = time.perf_counter()
        compiled = jax.jit(step).lower(variables, x).compile()
        facts[name] = time.perf_counter() - start, program.read(compiled)
        turns[name] = clock.once(lambda run=compiled, args=(variables, x): run(*args))
    times = clock.take_turns(turns, rounds)
    bf16 = facts["bf16"][1] if "bf16" in facts else None
    return [
        {
            "way": name,
            "step ms": 1e3 * statistics.median(times[name]),
            "/ bf16": statistics.median(times[name]) / statistics.median(times["bf16"]) if bf16 else None,
            "fastest ms": 1e3 * min(times[name]),
            "compile s": compile_s,
            "temporaries MB": read.temporaries / 1e6,
            "/ bf16 ": read.temporaries / bf16.temporaries if bf16 else None,
            "total MB": read.total / 1e6,
            "/ bf16  ": read.total / bf16.total if bf16 else None,
        }
        for name, (compile_s, read) in facts.items()
    ]


def main() -> None:
    """Measures and prints."""
    args = output.parse(
        __doc__, tiny={"rounds": 1}, choices={"ways": ways.WAYS}, rounds=10, ways=list(ways.WAYS)
    )
    sizes = TINY if args.tiny else Sizes()
    is_cpu = jax.default_backend() == "cpu"
    device = output.cpu_name() if is_cpu else jax.devices()[0].device_kind.replace(" ", "-")
    sections = {f"{device}, {sizes}, {args.rounds} rounds": rows(args.ways, sizes, args.rounds)}
    output.finish("step", device, sections, args)


if __name__ == "__main__":
    main()
