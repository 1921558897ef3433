"""Matrix products: TFLOP/s of bfloat16, of our FP8 product, and of `torch._scaled_mm`, which is the ceiling.

    python examples/bench/gemm.py
    python examples/bench/gemm.py --tiny

The operands of ours and of torch's are the same random codes, ready: no cast is timed. Each program
multiplies several pairs, which together do not fit into a GPU's cache. "(k, n)" is the kernel as a dense
layer keeps it: cuBLASLt takes FP8 operands with the summed axis last, so XLA transposes it first.
"""

from collections.abc import Callable
from typing import Any

import clock
import jax
import jax.numpy as jnp
import output
from jax import lax

from fp8jax import backends, formats, quantize
from fp8jax.inspect import program

# Size of the square matrices -> pairs of them; the first is judged.
SIZES = {8192: 4, 4096: 12, 16384: 2}
TINY = {32: 2, 64: 2}

TORCH, OURS, OURS_KN, BF16 = "torch._scaled_mm", "fp8jax", "fp8jax, kernel (k, n)", "bf16"
LAST = (((1,), (1,)), ((), ()))  # both sum over their last axis
FIRST = (((1,), (0,)), ((), ()))


def operands(size: int, pairs: int) -> tuple[list[Any], list[Any]]:
    """Pairs of random matrices, in bfloat16 and as FP8 codes with a scale."""

    @jax.jit
    def matrix(key: jax.Array) -> Any:
        x = jax.random.normal(key, (size, size), jnp.bfloat16)
        return x, quantize(x, formats.E4M3)

    both = [matrix(key) for key in jax.random.split(jax.random.key(0), 2 * pairs)]
    wide, narrow = zip(*both, strict=True)
    return [list(zip(each[::2], each[1::2], strict=True)) for each in (wide, narrow)]  # pyright: ignore


def rows(size: int, pairs: int, rounds: int, skipped: dict[str, str]) -> output.Rows:
    """One row a way, from the seconds of all pairs."""
    wide, narrow = operands(size, pairs)
    product = backends.BACKENDS["xla"].dot

    def multiplied(dims: Any) -> Callable[[Any], Any]:
        return lambda each: [product(a, b, dims, out_dtype=jnp.bfloat16, precise=False) for a, b in each]

    def in_bf16(each: Any) -> Any:
        return [lax.dot_general(a, b, LAST, preferred_element_type=jnp.bfloat16) for a, b in each]

    ways = {BF16: (in_bf16, wide), OURS: (multiplied(LAST), narrow), OURS_KN: (multiplied(FIRST), narrow)}
    compiled = {name: jax.jit(function).lower(each).compile() for name, (function, each) in ways.items()}
    timers = {
        name: clock.timer(lambda run=run, name=name: run(ways[name][1])) for name, run in compiled.items()
    }
    try:
        timers[TORCH] = clock.timer(*torch_product(narrow))
    except (ImportError, RuntimeError) as error:
        skipped[f"{TORCH} at {size}"] = output.first_line(error)
    times, found = clock.take_turns(timers, rounds), []
    for name in times:
        low, middle, high = (2e-12 * size**3 * pairs / s for s in clock.quartiles(times[name]))
        fp8 = program.read(compiled[name]).count("cublaslt_f8") if name in compiled else None
        found.append(
            {
                "way": name,
                "TFLOP/s": middle,
                "lower": high,
                "upper": low,
                "torch /": clock.ratio(times, TORCH, name),
                "FP8 GEMMs": None if fp8 is None else f"{fp8} of {pairs}",
            }
        )
    return found


def torch_product(pairs: list[Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The same products by torch, and how to wait for them."""
    import torch

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"

    def tensor(x: Any) -> Any:
        codes = jax.block_until_ready(lax.bitcast_convert_type(x.data, jnp.uint8))
        scale = torch.tensor(float(x.scale), device=device)
        return torch.from_dlpack(codes).view(torch.float8_e4m3fn), scale

    taken = [(*tensor(a), *tensor(b)) for a, b in pairs]

    def run() -> Any:
        return [
            torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=device == "cuda"
            )
            for a, a_scale, b, b_scale in taken
        ]

    return run, lambda _: torch.cuda.synchronize() if device == "cuda" else None


def main() -> None:
    """Measures and prints."""
    args = output.parse(__doc__, tiny={"rounds": 2}, rounds=30)
    skipped: dict[str, str] = {}
    sizes = TINY if args.tiny else SIZES
    sections = {
        f"GEMM {size} x {size} x {size}": rows(size, pairs, args.rounds, skipped)
        for size, pairs in sizes.items()
    }
    output.finish("gemm", output.device(), sections, args, skipped=skipped)


if __name__ == "__main__":
    main()
