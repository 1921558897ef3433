"""Matrix products: TFLOP/s of bfloat16, of our FP8 products, and of `torch._scaled_mm`, which is the ceiling.

    python examples/bench/gemm.py
    python examples/bench/gemm.py --tilings 128x128x8x3x16 64x128x4x4x8
    python examples/bench/gemm.py --tiny

The operands of ours and of torch's are the same random codes, ready: no cast is timed. Each program
multiplies several pairs, which together do not fit into a GPU's cache. "(k, n)" is the kernel as a dense
layer keeps it: cuBLASLt takes FP8 operands with the summed axis last, so XLA transposes it first.

"block", "mxfp8" and "nvfp4" have a scale for each block. "block" is a Pallas kernel: on Hopper in Mosaic GPU,
elsewhere in Triton. `--tilings` are those of the kernel in Triton, the default first: rows and columns of a
tile, warps, stages and grouped rows (`fp8jax.backends.pallas.Tiling`). The others are timed on Hopper, too.
`--profile FOLDER` adds the time of each kernel of "fp8jax" and "block" at the first size, on a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import clock
import jax
import jax.numpy as jnp
import kernels
import output
from jax import lax

from fp8jax import backends, formats, quantize
from fp8jax.backends import pallas, reference
from fp8jax.inspect import program
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    quantize_blocks,
)

# Size of the square matrices -> pairs of them; the first is judged.
SIZES = {8192: 4, 4096: 12, 16384: 2}
TINY = {32: 2, 64: 2}

TORCH, OURS, OURS_KN, BF16 = "torch._scaled_mm", "fp8jax", "fp8jax, kernel (k, n)", "bf16"
LEAST = "block, least speed / the FP8 GEMM's"
METHODS = {
    "block": (BLOCK_1X128, BLOCK_128X128),
    "block, weight gradient": (BLOCK_1X128, BLOCK_1X128),
    "mxfp8": (MXFP8, MXFP8),
    "nvfp4": (NVFP4_1X16, NVFP4_16X16),
}
TILING = "x".join(map(str, pallas.TILING))
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


def in_blocks(wide: Any, tilings: list[str], skipped: dict[str, str]) -> dict[str, Any]:
    """For each way with scales of blocks its product, and its operands."""
    found = {}
    for scaling, methods in METHODS.items():
        granularity = "x".join(map(str, methods[0].block))
        if reason := backends.why_not("auto", granularity):
            skipped[scaling] = reason
            continue
        cast = [jax.jit(functools.partial(quantize_blocks, method=method)) for method in methods]
        ready = [tuple(to(x) for to, x in zip(cast, pair, strict=True)) for pair in wide]
        for number, text in enumerate(tilings if scaling == "block" else [TILING]):
            dot = backends.BACKENDS[backends.choose("auto", granularity).name].dot
            if number or text != TILING:
                tiling = pallas.Tiling(*map(int, text.split("x")))
                dot = reference.dot_by(functools.partial(pallas.gemm, tiling=tiling))
            dot = functools.partial(dot, dimension_numbers=LAST, out_dtype=jnp.bfloat16, precise=False)
            name = f"{scaling} {text}" if number else scaling
            found[name] = (lambda each, dot=dot: [dot(a, b) for a, b in each], ready)
    return found


def rows(
    size: int, pairs: int, rounds: int, tilings: list[str], skipped: dict[str, str]
) -> tuple[output.Rows, dict[str, Any]]:
    """One row a way, from the seconds of all pairs; and the programs, with their operands."""
    wide, narrow = operands(size, pairs)
    product = backends.BACKENDS["xla"].dot

    def multiplied(dims: Any) -> Callable[[Any], Any]:
        return lambda each: [product(a, b, dims, out_dtype=jnp.bfloat16, precise=False) for a, b in each]

    def in_bf16(each: Any) -> Any:
        return [lax.dot_general(a, b, LAST, preferred_element_type=jnp.bfloat16) for a, b in each]

    ways = {BF16: (in_bf16, wide), OURS: (multiplied(LAST), narrow), OURS_KN: (multiplied(FIRST), narrow)}
    ways |= in_blocks(wide, tilings, skipped)

    def compiled_of(way: Any) -> Any:
        return jax.jit(way[0]).lower(way[1]).compile()

    compiled = dict(zip(ways, output.side_by_side(compiled_of, ways.values()), strict=True))
    runs = {name: functools.partial(run, ways[name][1]) for name, run in compiled.items()}
    timers = {name: clock.timer(runs[name], least_s=clock.LEAST_S_OF_NEW) for name in compiled}
    try:
        timers[TORCH] = clock.timer(*torch_product(narrow), clock.LEAST_S_OF_NEW)
    except (ImportError, RuntimeError) as error:
        skipped[f"{TORCH} at {size}"] = output.first_line(error)
    times, found = clock.take_turns(timers, rounds), []
    for name in times:
        low, middle, high = (2e-12 * size**3 * pairs / s for s in clock.quartiles(times[name]))
        kinds = ("cublaslt_f8", "pallas", "cudnn")
        fp8 = program.read(compiled[name]).count(*kinds) if name in compiled else None
        found.append(
            {
                "way": name,
                "TFLOP/s": middle,
                "lower": high,
                "upper": low,
                "torch /": clock.ratio(times, TORCH, name),
                "fp8jax /": clock.ratio(times, OURS, name),
                "FP8 GEMMs": None if fp8 is None else f"{fp8} of {pairs}",
            }
        )
    return found, runs


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


def profile(runs: dict[str, Any], args: Any, skipped: dict[str, str]) -> dict[str, output.Rows]:
    """With `--profile` the kernels of the programs; a profiler that fails does not end the measurement."""
    try:
        return kernels.tables({name: run for name, run in runs.items() if run is not None}, args)
    except RuntimeError as error:
        skipped["kernels"] = output.first_line(error)
        return {}


def main() -> None:
    """Measures and prints."""
    args = output.parse(__doc__, tiny={"rounds": 2}, rounds=30, tilings=[TILING], profile="")
    skipped: dict[str, str] = {}
    sizes = TINY if args.tiny else SIZES
    sections: dict[str, output.Rows] = {}
    profiled: dict[str, output.Rows] = {}
    for number, (size, pairs) in enumerate(sizes.items()):
        found, runs = rows(size, pairs, args.rounds, args.tilings, skipped)
        sections[f"GEMM {size} x {size} x {size}"] = found
        if number == 1:
            both = [row for found in sections.values() for row in found if row["way"] == "block"]
            least = min((row["fp8jax /"] for row in both), default=None)
            sections["scales of blocks, the first two sizes"] = [{"way": LEAST, "fp8jax /": least}]
        output.finish("gemm", output.device(), sections | profiled, args, skipped=skipped, is_last=False)
        if number == 0:
            profiled = profile(
                {f"{name} at {size}": runs.get(name) for name in (OURS, "block")}, args, skipped
            )
        del runs  # the operands, before those of the next size
    output.finish("gemm", output.device(), sections | profiled, args, skipped=skipped)


if __name__ == "__main__":
    main()
