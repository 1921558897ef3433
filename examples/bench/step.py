"""Time, compile time and memory of one training step on this machine, for each way of multiplying.

    python examples/bench/step.py
    python examples/bench/step.py --rounds 20 --ways bf16 "fp8jax O2"
    python examples/bench/step.py --json
    python examples/bench/step.py --record examples/records

Loss and all gradients of a transformer: 4 layers, width 512, 8 heads, 2048 tokens, no rematerialization.
The ways take turns, one step each per round, so that a machine that slows down slows all of them; times are
medians over the rounds, and "/ bf16" compares within this one run. "total" counts arguments and outputs too:
XLA uses the outputs' buffers while it computes, so a way whose gradients are small needs more temporaries.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import output
import ways

from fp8jax.inspect import program


class Sizes(NamedTuple):
    """Of the model and its input."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    batch: int = 8
    context: int = 256


TINY = Sizes(layers=1, width=32, heads=2, batch=2, context=16)


class Transformer(nn.Module):
    """A stack of decoder blocks without embedding or head."""

    dense: Callable[..., nn.Module]
    dtype: Any
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, context, width) -> the same."""
        for _ in range(self.sizes.layers):
            x = x + self.attend(nn.LayerNorm(dtype=self.dtype)(x))
            y = nn.gelu(self.dense(4 * self.sizes.width)(nn.LayerNorm(dtype=self.dtype)(x)))
            x = x + self.dense(self.sizes.width)(y)
        return x

    def attend(self, x: jax.Array) -> jax.Array:
        """Causal self-attention."""
        heads = (*x.shape[:-1], 3 * self.sizes.heads, self.sizes.width // self.sizes.heads)
        query, key, value = jnp.split(self.dense(3 * self.sizes.width)(x).reshape(heads), 3, axis=-2)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.dense(self.sizes.width)(y.reshape(x.shape))


class Step(NamedTuple):
    """A compiled step with what it takes."""

    name: str
    run: jax.stages.Compiled
    args: tuple[Any, ...]
    compile_s: float
    memory: program.Program


def prepare(name: str, sizes: Sizes) -> Step:
    """Compiles one way's step."""
    way = ways.WAYS[name]
    model, step = ways.loss_and_gradient(way, Transformer(way.dense, way.dtype, sizes))
    x = jax.random.normal(jax.random.key(1), (sizes.batch, sizes.context, sizes.width), way.dtype)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    start = time.perf_counter()
    compiled = jax.jit(step).lower(variables, x).compile()
    compile_s = time.perf_counter() - start
    return Step(name, compiled, (variables, x), compile_s, program.read(compiled))


def measure(steps: list[Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, taking turns; one round before them warms up."""
    times: dict[str, list[float]] = {step.name: [] for step in steps}
    for round_ in range(rounds + 1):
        for step in steps:
            start = time.perf_counter()
            jax.block_until_ready(step.run(*step.args))
            if round_:
                times[step.name].append(time.perf_counter() - start)
    return times


def rows(steps: list[Step], times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per way."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    bf16 = next((step.memory for step in steps if step.name == "bf16"), None)
    return [
        {
            "way": step.name,
            "step ms": medians[step.name] * 1e3,
            "/ bf16": medians[step.name] / medians["bf16"] if bf16 else None,
            "fastest ms": min(times[step.name]) * 1e3,
            "compile s": step.compile_s,
            "temporaries MB": step.memory.temporaries / 1e6,
            "/ bf16 ": step.memory.temporaries / bf16.temporaries if bf16 else None,
            "total MB": step.memory.total / 1e6,
            "/ bf16  ": step.memory.total / bf16.total if bf16 else None,
        }
        for step in steps
    ]


def main() -> None:
    """Compiles all, measures them taking turns, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="steps of each way that are timed")
    parser.add_argument("--ways", nargs="+", default=list(ways.WAYS), choices=list(ways.WAYS), metavar="WAY")
    output.add_options(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.tiny:
        args.rounds = 1
    sizes = TINY if args.tiny else Sizes()
    steps = [prepare(name, sizes) for name in args.ways]
    device = (
        output.cpu_name()
        if jax.default_backend() == "cpu"
        else jax.devices()[0].device_kind.replace(" ", "-")
    )
    title = f"{device}, {sizes}, {args.rounds} rounds"
    output.finish("step", device, {title: rows(steps, measure(steps, args.rounds))}, args)


if __name__ == "__main__":
    main()
