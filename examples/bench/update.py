"""What an optimizer step costs: kernels, memory and traffic on a GPU that is not here, time on this machine.

    python examples/bench/update.py
    python examples/bench/update.py --target b200 --leaves 24 --size 4096
    python examples/bench/update.py --record examples/records

`tx.update` and `apply_updates` in one program, parameters and state donated, for square leaves whose
gradients come in the recipe's format; `optax.adamw` in float32 is the reference. "temporaries %" is of the
float32 size of the parameters, "of a leaf" in float32 leaves. "moved" is what all kernels read and write;
"/ state" is relative to the bytes of parameters, gradients and moments. On this machine the recipes take
turns, and the leaves are fewer.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import output

import fp8jax
from fp8jax import Recipe, ScaledArray, formats
from fp8jax.inspect import program, targets

OPTAX = "optax.adamw"
# The optimizers of float32 weights and gradients; recipes are those of `fp8jax.optim.adamw`.
OPTIMIZERS = {
    OPTAX: lambda: optax.adamw(3e-4),
    "adamw_8bit": lambda: fp8jax.optim.adamw_8bit(3e-4, "fp32"),
    "adafactor": lambda: fp8jax.optim.adafactor(3e-4, "fp32"),
}
WAYS = [*OPTIMIZERS, "te", "O1", "O2", "O3"]


def arguments(way: str, leaves: int, size: int) -> tuple[Any, Any, Any, Any]:
    """An optimizer, and shapes of the parameters, its state and the gradients."""
    recipe = Recipe.parse("fp32" if way in OPTIMIZERS else way)

    def leaf(format: str) -> Any:
        data = jax.ShapeDtypeStruct((size, size), formats.get(format).dtype)
        return data if format == "FP32" else ScaledArray(data, jax.ShapeDtypeStruct((1, 1), jnp.float32))

    params, grads = (
        {f"layer_{i}": leaf(format) for i in range(leaves)} for format in (recipe.weight, recipe.weight_grad)
    )
    tx = OPTIMIZERS[way]() if way in OPTIMIZERS else fp8jax.optim.adamw(3e-4, recipe)
    return tx, params, jax.eval_shape(tx.init, params), grads


def step_of(tx: Any) -> Any:
    """One optimizer step."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return fp8jax.apply_updates(params, updates), state

    return step


def nbytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def row(way: str, read: program.Program, leaves: int, size: int, state: int) -> dict[str, Any]:
    """A program in one row."""
    return {
        "way": way,
        "kernels": read.kernels,
        "per leaf": read.kernels / leaves,
        "temporaries GB": read.temporaries / 1e9,
        "temporaries %": 100 * read.temporaries / (4 * leaves * size**2),
        "of a leaf": read.temporaries / (4 * size**2),
        "moved GB": read.moved / 1e9,
        "/ state": read.moved / state,
    }


def on_target(way: str, leaves: int, size: int, target: str) -> dict[str, Any]:
    """A step compiled for the target."""
    tx, *shapes = arguments(way, leaves, size)
    compiled = targets.compile_for(step_of(tx), *shapes, target=target, donate_argnums=(0, 1))
    return row(way, program.read(compiled), leaves, size, nbytes(shapes))


def here(ways: list[str], leaves: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """Steps on this machine, taking turns."""
    runs: dict[str, Any] = {}
    for way in ways:
        tx, *shapes = arguments(way, leaves, size)
        compiled = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(*shapes).compile()
        # Codes of small numbers, with scale 1: zeros would take other ways through the processor.
        params, state, grads = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
        runs[way] = [compiled, params, state, grads, nbytes(shapes), []]
    for _ in range(rounds + 1):
        for way in ways:
            compiled, params, state, grads, _, times = runs[way]
            begun = time.perf_counter()
            params, state = jax.block_until_ready(compiled(params, state, grads))
            times.append(time.perf_counter() - begun)
            runs[way][1:3] = params, state
    rows = []
    for way, (compiled, *_, state_bytes, times) in runs.items():
        milliseconds = 1e3 * statistics.median(times[1:])
        read = row(way, program.read(compiled), leaves, size, state_bytes)
        rows.append(
            {
                "way": way,
                "step ms": milliseconds,
                "ns / parameter": 1e6 * milliseconds / leaves / size**2,
                **read,
            }
        )
    return rows


def main() -> None:
    """Compiles, runs, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", choices=list(targets.TARGETS))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument("--leaves", type=int, default=100)
    parser.add_argument("--size", type=int, default=1871, help="rows and columns of a leaf")
    parser.add_argument("--leaves-here", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    output.add_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.leaves, args.size, args.leaves_here, args.rounds = 3, 64, 2, 2
    sections = {}
    if targets.why_not() is None:
        title = f"{args.target}, {args.leaves} leaves of {args.size} x {args.size}"
        sections[title] = [on_target(way, args.leaves, args.size, args.target) for way in args.ways]
    title = f"{output.cpu_name()}, {args.leaves_here} leaves, {args.rounds} rounds"
    sections[title] = here(args.ways, args.leaves_here, args.size, args.rounds)
    output.finish("update", f"{args.target}-{output.cpu_name()}", sections, args)


if __name__ == "__main__":
    main()
