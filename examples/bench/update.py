"""An optimizer step: kernels, memory and traffic on a GPU that is not here, time on this machine.

    python examples/bench/update.py
    python examples/bench/update.py --target b200 --leaves 24 --size 4096
    python examples/bench/update.py --record examples/records

`tx.update` and `apply_updates` in one program, with donated parameters and state, for square leaves (`--size`
rows and columns) with gradients in the recipe's format. The reference is `optax.adamw` in float32.
"temporaries %" is relative to the float32 size of the parameters, "of a leaf" to a float32 leaf. "moved" are
the bytes that all kernels read and write, "/ state" relative to the bytes of parameters, gradients and
moments. On this machine the recipes take turns, with fewer leaves. `--target ""` leaves the GPU out;
`--profile FOLDER` adds the time of each kernel on a GPU that is here.
"""

import statistics
from collections.abc import Callable
from typing import Any

import clock
import jax
import jax.numpy as jnp
import kernels
import optax
import output

import fp8jax
from fp8jax import Recipe, ScaledArray, formats
from fp8jax.inspect import program, targets
from fp8jax.quantization import as_gradients, is_scaled

OPTAX = "optax.adamw"
# Optimizers of float32 weights and gradients; the recipes are for `fp8jax.optim.adamw`, after "muon " for
# `fp8jax.optim.muon`.
MUON = "muon "
OPTIMIZERS = {
    OPTAX: lambda: optax.adamw(3e-4),
    "optax.contrib.muon": lambda: optax.contrib.muon(3e-4),
    "adamw_8bit": lambda: fp8jax.optim.adamw_8bit(3e-4, "fp32"),
    "adafactor": lambda: fp8jax.optim.with_dequantized(optax.adafactor(3e-4), "fp32"),
}
WAYS = [*OPTIMIZERS, "te", "O1", "O2", "O3", "fp8", "fp8,moments=E5M2+E4M4", MUON + "te", MUON + "fp8"]


def arguments(way: str, leaves: int, size: int) -> tuple[Any, Any, Any, Any]:
    """An optimizer, and shapes of the parameters, its state and the gradients."""
    recipe = Recipe.parse("fp32" if way in OPTIMIZERS else way.removeprefix(MUON))
    optimizer = fp8jax.optim.muon if way.startswith(MUON) else fp8jax.optim.adamw

    def leaf(format: str) -> Any:
        data = jax.ShapeDtypeStruct((size, size), formats.get(format).dtype)
        return data if format == "FP32" else ScaledArray(data, jax.ShapeDtypeStruct((1, 1), jnp.float32))

    params, grads = (
        {f"layer_{i}": leaf(format) for i in range(leaves)} for format in (recipe.weight, recipe.weight_grad)
    )
    tx = OPTIMIZERS[way]() if way in OPTIMIZERS else optimizer(3e-4, recipe)
    return tx, params, jax.eval_shape(tx.init, params), jax.eval_shape(as_gradients, grads)


def step_of(tx: Any) -> Any:
    """One optimizer step."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return fp8jax.apply_updates(params, updates), state

    return step


def nbytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def row(way: str, read: program.CompiledProgram, leaves: int, size: int, state: int) -> dict[str, Any]:
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


def _of_ones(x: Any) -> Any:
    return ScaledArray(x.data, jnp.ones(x.bits.shape)) if is_scaled(x) else x


def loop(run: Any, shapes: Any) -> Callable[[], Any]:
    """A step that goes on from the step before."""
    # Codes of small numbers, with scale 1: a CPU computes zeros in other ways.
    params, state, grads = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    grads = as_gradients({name: _of_ones(x) for name, x in grads.items()})

    def step() -> Any:
        nonlocal params, state
        params, state = run(params, state, grads)
        return params, state

    return step


def here(ways: list[str], leaves: int, size: int, rounds: int, runs: dict[str, Any]) -> output.Rows:
    """Steps on this machine, taking turns; they go into `runs`."""

    def compiled(way: str) -> Any:
        tx, *shapes = arguments(way, leaves, size)
        return jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(*shapes).compile(), shapes

    turns, facts = {}, {}
    for way, (program_of, shapes) in zip(ways, output.side_by_side(compiled, ways), strict=True):
        runs[way] = loop(program_of, shapes)
        turns[way] = clock.timer(runs[way])
        facts[way] = row(way, program.read(program_of), leaves, size, nbytes(shapes))
    times = clock.take_turns(turns, rounds)
    rows = []
    for way in ways:
        seconds = statistics.median(times[way])
        speed = {"step ms": 1e3 * seconds, f"/ {OPTAX}": clock.ratio(times, way, OPTAX)}
        speed["ns / parameter"] = 1e9 * seconds / leaves / size**2
        rows.append({"way": way, **speed, **facts[way]})
    return rows


def main() -> None:
    """Compiles, runs, prints."""
    args = output.parse(
        __doc__,
        tiny={"leaves": 3, "size": 64, "leaves_here": 2, "rounds": 2},
        choices={"target": ["", *targets.TARGETS], "ways": WAYS},
        target="h200",
        ways=WAYS,
        leaves=100,
        size=1871,
        leaves_here=8,
        rounds=10,
        profile="",
    )
    sections = {}
    if args.target and targets.why_not() is None:
        title = f"{args.target}, {args.leaves} leaves of {args.size} x {args.size}"
        sections[title] = [on_target(way, args.leaves, args.size, args.target) for way in args.ways]
    device = output.device()
    title = f"{device}, {args.leaves_here} leaves of {args.size} x {args.size}, {args.rounds} rounds"
    runs: dict[str, Any] = {}
    sections[title] = here(args.ways, args.leaves_here, args.size, args.rounds, runs)
    output.finish("update", f"{args.target}-{device}" if args.target else device, sections, args)
    kernels.add("update", runs, sections, args)


if __name__ == "__main__":
    main()
