"""Matrix products: TFLOP/s of bfloat16, of our FP8 product, and of `torch._scaled_mm`, which is the ceiling.

The operands of ours and of torch's are the same random codes, ready: no cast is timed. Each program
multiplies several pairs, which together do not fit into a GPU's cache. "(k, n)" is the kernel as a dense
layer keeps it: cuBLASLt takes FP8 operands with the summed axis last, so XLA transposes it first.
"""

from collections.abc import Callable
from typing import Any

import clock
import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import backends, formats, quantize
from fp8jax.inspect import program
from on_gpu.notes import Given, Notes

# Size of the square matrices -> pairs of them.
SIZES = {8192: 4, 4096: 12, 16384: 2}
TINY = {32: 2, 64: 2}
JUDGED = 8192

TORCH, OURS, OURS_KN, BF16 = "torch._scaled_mm", "fp8jax", "fp8jax, kernel (k, n)", "bf16"
LAST = (((1,), (1,)), ((), ()))  # both sum over their last axis
FIRST = (((1,), (0,)), ((), ()))


def measure(given: Given, notes: Notes) -> None:
    """A table a size; the one that is judged comes first."""
    sizes = TINY if given.tiny else SIZES
    for number, (size, pairs) in enumerate(sizes.items()):
        with notes.attempt(f"GEMM {size}"):
            until = given.until - given.left * (1 - 1 / (len(sizes) - number))
            times, fp8 = times_of(size, pairs, given, notes, until)
            notes.table(f"GEMM {size} x {size} x {size}", rows(times, size, pairs, fp8))
            if size == JUDGED or given.tiny:
                notes.figure("gemm", clock.ratio(times, TORCH, OURS))


def operands(size: int, pairs: int) -> tuple[list[Any], list[Any]]:
    """Pairs of random matrices, in bfloat16 and as FP8 codes with a scale."""

    @jax.jit
    def matrix(key: jax.Array) -> Any:
        x = jax.random.normal(key, (size, size), jnp.bfloat16)
        return x, quantize(x, formats.E4M3)

    both = [matrix(key) for key in jax.random.split(jax.random.key(0), 2 * pairs)]
    wide, narrow = zip(*both, strict=True)
    return [list(zip(each[::2], each[1::2], strict=True)) for each in (wide, narrow)]  # pyright: ignore


def times_of(size: int, pairs: int, given: Given, notes: Notes, until: float) -> tuple[clock.Times, Any]:
    """Seconds of all pairs, each way; and how many FP8 GEMMs the ways' programs have."""
    wide, narrow = operands(size, pairs)
    fp8 = backends.BACKENDS["xla"].dot

    def multiplied(dims: Any) -> Callable[[Any], Any]:
        return lambda each: [fp8(a, b, dims, out_dtype=jnp.bfloat16, precise=False) for a, b in each]

    def in_bf16(each: Any) -> Any:
        return [lax.dot_general(a, b, LAST, preferred_element_type=jnp.bfloat16) for a, b in each]

    ways = {BF16: (in_bf16, wide), OURS: (multiplied(LAST), narrow), OURS_KN: (multiplied(FIRST), narrow)}
    lowered = {name: jax.jit(function).lower(each) for name, (function, each) in ways.items()}
    compiled = notes.compile_all({name: each.compile for name, each in lowered.items()})
    timers = {
        name: clock.timer(lambda run=run, name=name: run(ways[name][1])) for name, run in compiled.items()
    }
    with notes.attempt(f"{TORCH} at {size}"):
        run, wait = torch_product(narrow, given.device)
        timers[TORCH] = clock.timer(run, wait)
    counts = {name: program.read(run).count("cublaslt_f8") for name, run in compiled.items()}
    return clock.take_turns(timers, given.rounds, until), counts


def torch_product(pairs: list[Any], device: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The same products by torch, and how to wait for them."""
    import torch

    def tensor(x: Any) -> Any:
        codes = jax.block_until_ready(lax.bitcast_convert_type(x.data, jnp.uint8))
        scale = torch.tensor(float(x.scale), device="cuda" if device == "gpu" else "cpu")
        return torch.from_dlpack(codes).view(torch.float8_e4m3fn), scale

    taken = [(*tensor(a), *tensor(b)) for a, b in pairs]

    def run() -> Any:
        return [
            torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=device == "gpu"
            )
            for a, a_scale, b, b_scale in taken
        ]

    return run, lambda _: torch.cuda.synchronize() if device == "gpu" else None


def rows(times: clock.Times, size: int, pairs: int, fp8: dict[str, int]) -> list[dict[str, Any]]:
    """One row a way."""
    found = []
    for name in times:
        low, middle, high = (2e-12 * size**3 * pairs / s for s in clock.quartiles(times[name]))
        found.append(
            {
                "way": name,
                "TFLOP/s": middle,
                "lower": high,
                "upper": low,
                f"/ {TORCH}": clock.ratio(times, TORCH, name),
                "rounds": len(times[name]),
                "FP8 GEMMs": f"{fp8[name]} of {pairs}" if name in fp8 else None,
            }
        )
    return found
