"""The product of a mixture of experts, rows of each expert times its kernel, forward and backward.

    python examples/bench/moe.py
    python examples/bench/moe.py --rounds 20 --record examples/records

Ways: `one kernel` is a plain bf16 product of all rows with a single kernel: the work that must be done.
`lax.ragged_dot` is JAX's own in bf16, `blocks` is `fp8jax.dot.wide_ragged_dot` in bf16, `te` and `te,
current` are `fp8jax.dot.ragged_dot` in FP8, from bf16 rows and float32 kernels. "here" times them on this
machine, taking turns; "h200" compiles them for one that is not here: GEMMs (in loops over blocks they are
counted once), and temporaries. GEMM TFLOP counts what they multiply, the padding of blocks included.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import output
from jax import lax

from fp8jax.dot import init_ragged_state, ragged_dot, wide_ragged_dot
from fp8jax.inspect import program, targets
from fp8jax.rewrite import find
from fp8jax.scaling.merge import from_fm32, to_fm32


class Sizes(NamedTuple):
    """Of one product."""

    rows: int
    experts: int
    width: int
    features: int


HERE, THERE = Sizes(2048, 8, 512, 2048), Sizes(16384, 8, 1024, 4096)
TINY = Sizes(128, 4, 32, 64)


def one_kernel(rows: Any, kernels: Any, sizes: Any, state: Any) -> Any:
    """The rows times the first kernel."""
    del sizes, state
    return lax.dot(rows, kernels[0].astype(rows.dtype))


def in_bf16(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product of floats."""
    return lambda rows, kernels, sizes, state: product(rows, kernels.astype(rows.dtype), sizes)


def in_fp8(recipe: str) -> Callable[..., Any]:
    """Ours, with the state of the recipe's scaling."""

    def product(rows: Any, kernels: Any, sizes: Any, state: Any) -> Any:
        kept = state if "current" not in recipe else {}
        return ragged_dot(rows, kernels, sizes, recipe=recipe, state=kept, out_dtype=rows.dtype)

    return product


WAYS = {
    "one kernel": one_kernel,
    "lax.ragged_dot": in_bf16(lax.ragged_dot),
    "blocks": in_bf16(wide_ragged_dot),
    "te": in_fp8("te"),
    "te, current": in_fp8("te,scaling=current"),
}


def step_of(product: Callable[..., Any]) -> Callable[..., Any]:
    """The product and its gradients."""

    def step(rows: Any, kernels: Any, sizes: Any, grad: Any, state: Any) -> Any:
        def of(rows: Any, kernels: Any, state: Any) -> Any:
            return product(rows, kernels, sizes, state)

        out, vjp = jax.vjp(of, rows, kernels, to_fm32(state))
        *grads, new = vjp(grad)
        return out, grads, from_fm32(new)

    return step


def arguments(sizes: Sizes) -> tuple[Any, ...]:
    """Random rows, kernels and output gradients, and uneven experts."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (sizes.rows, sizes.width), jnp.bfloat16)
    kernels = jax.random.normal(keys[1], (sizes.experts, sizes.width, sizes.features)) * sizes.width**-0.5
    grad = jax.random.normal(keys[2], (sizes.rows, sizes.features), jnp.bfloat16)
    share = jnp.arange(1, sizes.experts + 1)
    counts = (sizes.rows * share // jnp.sum(share)).astype(jnp.int32)
    counts = counts.at[-1].add(sizes.rows - jnp.sum(counts))
    return rows, kernels, counts, grad, init_ragged_state("te", sizes.experts)


def here(names: list[str], sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """One row per way, timed."""
    args = arguments(sizes)
    steps = {name: jax.jit(step_of(WAYS[name])).lower(*args).compile() for name in names}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            if round_:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    reference = medians.get("one kernel")
    return [
        {
            "way": name,
            "ms": 1e3 * medians[name],
            "/ one kernel": medians[name] / reference if reference else None,
            "temporaries MB": program.read(steps[name]).temporaries / 1e6,
        }
        for name in names
    ]


def there(names: list[str], sizes: Sizes, target: str) -> list[dict[str, Any]]:
    """One row per way, compiled for the target."""
    args = jax.eval_shape(lambda: arguments(sizes))
    rows = []
    for name in names:
        step = step_of(WAYS[name])
        read = program.read(targets.compile_for(step, *args, target=target))
        flops = sum(dot.flops for dot in find(jax.make_jaxpr(step)(*args).jaxpr, ()).dots)
        if name == "lax.ragged_dot":  # every row with every kernel, in all three products
            flops *= sizes.experts
        rows.append(
            {
                "way": name,
                "FP8 GEMMs": read.count("cublaslt_f8"),
                "other GEMMs": read.count() - read.count("cublaslt_f8"),
                "GEMM TFLOP": flops / 1e12,
                "temporaries MB": read.temporaries / 1e6,
            }
        )
    return rows


def main() -> None:
    """Times all here, compiles all for the target, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="steps of each way that are timed")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--target", default="h200", help="a GPU that is not here")
    output.add_options(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    mine, theirs = (TINY, TINY) if args.tiny else (HERE, THERE)
    device = output.cpu_name()
    sections = {f"here, {device}, {mine}": here(args.ways, mine, 1 if args.tiny else args.rounds)}
    if reason := targets.why_not():
        print(reason, file=sys.stderr)
    else:
        sections[f"{args.target}, {theirs}"] = there(args.ways, theirs, args.target)
    output.finish("moe", device, sections, args)


if __name__ == "__main__":
    main()
