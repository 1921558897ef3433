"""The ragged dot product of a mixture of experts, rows of each expert times its kernel, forward and backward.

    python examples/bench/moe.py
    python examples/bench/moe.py --rounds 20 --record examples/records

Ways: `one kernel` is a bf16 GEMM of all rows with a single kernel, the least work. `lax.ragged_dot` is JAX's
in bf16, `blocks` is `fp8jax.dot.high_precision_ragged_dot` in bf16, the others are `fp8jax.dot.ragged_dot` in
FP8 or FP4, from bf16 rows and float32 kernels. No GPU has GEMMs of all of `te`, `block`, `mxfp8` and `nvfp4`.
"here" times them on this machine, taking turns. "h200" compiles them for a GPU that is not here: GEMMs
(counted once in loops over blocks) and temporaries. GEMM TFLOP includes the padding of blocks.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import clock
import jax
import jax.numpy as jnp
import output
from jax import lax

from fp8jax.dot import high_precision_ragged_dot, init_ragged_state, ragged_dot
from fp8jax.inspect import program, targets
from fp8jax.rewrite import find_dots
from fp8jax.scaling.merge import from_fm32, to_fm32


class Sizes(NamedTuple):
    """Sizes of one dot product."""

    rows: int
    experts: int
    width: int
    features: int


HERE, THERE = Sizes(2048, 8, 512, 2048), Sizes(16384, 8, 1024, 4096)
TINY = Sizes(128, 4, 32, 64)


def in_bf16(product: Callable[..., Any]) -> Callable[..., Any]:
    """A dot product of floats."""
    return lambda rows, kernels, sizes, state: product(rows, kernels.astype(rows.dtype), sizes)


def in_fp8(recipe: str) -> Callable[..., Any]:
    """fp8jax's, with the state of the recipe's scaling."""
    options = {"recipe": recipe, "out_dtype": jnp.bfloat16}
    own = init_ragged_state(recipe, 1)

    def product(rows: Any, kernels: Any, sizes: Any, state: Any) -> jax.Array:
        if "scale" not in own:  # not delayed scaling's
            state = {name: jnp.repeat(x, len(kernels), 0) for name, x in own.items()}
        return ragged_dot(rows, kernels, sizes, state=state, **options)

    return product


WAYS = {
    "one kernel": lambda rows, kernels, sizes, state: lax.dot(rows, kernels[0].astype(rows.dtype)),
    "lax.ragged_dot": in_bf16(lax.ragged_dot),
    "blocks": in_bf16(high_precision_ragged_dot),
    "te": in_fp8("te"),
    "te, current": in_fp8("te,scaling=current"),
    "block": in_fp8("block"),
    "mxfp8": in_fp8("mxfp8"),
    "nvfp4": in_fp8("nvfp4"),
}


def step_of(product: Callable[..., Any]) -> Callable[..., Any]:
    """The dot product and its gradients."""

    def step(rows: Any, kernels: Any, sizes: Any, grad: Any, state: Any) -> Any:
        of = lambda rows, kernels, state: product(rows, kernels, sizes, state)  # noqa: E731
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


def here(names: list[str], sizes: Sizes, rounds: int) -> output.Rows:
    """One row per way, timed."""
    args = arguments(sizes)
    steps = {name: jax.jit(step_of(WAYS[name])).lower(*args).compile() for name in names}
    turns = {name: clock.timer(lambda step=step: step(*args)) for name, step in steps.items()}
    times = clock.take_turns(turns, rounds)
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


def there(names: list[str], sizes: Sizes, target: str) -> output.Rows:
    """One row per way, compiled for the target."""
    args = jax.eval_shape(lambda: arguments(sizes))
    rows = []
    for name in names:
        step = step_of(WAYS[name])
        read = program.read(targets.compile_for(step, *args, target=target))
        flops = sum(dot.flops for dot in find_dots(jax.make_jaxpr(step)(*args).jaxpr, ()).dots)
        if name == "lax.ragged_dot":  # each row with each kernel, in all three GEMMs
            flops *= sizes.experts
        figures = {"GEMM TFLOP": flops / 1e12, "temporaries MB": read.temporaries / 1e6}
        rows.append({"way": name, **output.gemms(read), **figures})
    return rows


def main() -> None:
    """Times all ways here, compiles all for the target, prints."""
    choices = {"ways": WAYS, "target": targets.TARGETS}
    args = output.parse(
        __doc__, tiny={"rounds": 1}, choices=choices, rounds=10, ways=list(WAYS), target="h200"
    )
    mine, theirs = (TINY, TINY) if args.tiny else (HERE, THERE)
    sections = {f"here, {output.cpu_name()}, {mine}": here(args.ways, mine, args.rounds)}
    if reason := targets.why_not():
        print(reason, file=sys.stderr)
    else:
        sections[f"{args.target}, {theirs}"] = there(args.ways, theirs, args.target)
    output.finish("moe", output.cpu_name(), sections, args)


if __name__ == "__main__":
    main()
