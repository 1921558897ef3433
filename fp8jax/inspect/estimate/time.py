"""An estimate of the time of a training step on a GPU that is not here.

    bf16, te = (estimate(subject("layer"), recipe, target="h200") for recipe in ("bf16", "te"))
    te.seconds(), te.seconds(BEST), te.seconds(WORST), te.speedup(bf16)

The step is compiled for the GPU, and each kernel of the program gets a time. These are estimates: no GPU ran
the program. docs/guides/time.md compares them with an H100 and an H200. A kernel takes the longest of:

- a GEMM: its FLOPs at a share of the dense peak of its dtype, which no estimate exceeds. XLA's own costs of
  GEMMs are not used: FP8 GEMMs of an H200 exceed the peak there, and GEMMs with float32 outputs take 90 ms;
- a collective: the bytes that a device sends around a ring, at a share of its link;
- another kernel: a share of the time of XLA's cost model, which counts instructions, and latencies of
  collectives;
- its bytes at a share of the memory's bandwidth: those of all operands and results, or those of XLA's cost
  model where these are fewer, as of slices. XLA prices some Triton kernels, as of a softmax, at seconds; and
  kernels of cuDNN and Pallas not at all;
- a launch.

All this as often as the loops around the kernel run. Times are sums, so nothing runs beside anything else.

The shares are `Efficiency`s: `LIKELY`, and `BEST` and `WORST` for the bounds. TransformerEngine's "GEMM
Profiling Tutorial" measured the 12 GEMMs of a layer without quantization: bf16 at 0.61 of an H200's peak on a
H200 NVL, and at 0.65 on a B300; FP8 at 0.95 of the share of bf16 on both, MXFP8 at 0.92, and NVFP4 at 0.87
with the peak of a B200. DeepGEMM reports up to 0.78 of the peak for FP8. Current scaling's casts took about
twice the time of their bytes there, so `WORST` has half of the bandwidth. Pallas's GEMMs of blocks reached
0.49 of bf16's share on an H100 in Triton and 0.94 in Mosaic GPU, and 0.40 and 0.63 for weight gradients. The
other shares of the memory, the link and XLA's costs, and the launch, are assumptions. Float32 GEMMs count as
TF32.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8jax.inspect import targets
from fp8jax.inspect.program.compiled import Launch, collectives_of, kernels_of
from fp8jax.inspect.program.hlo import Array, Executed, parse
from fp8jax.inspect.step import OPTIMIZER, training_step
from fp8jax.inspect.subject import Subject, loss_of, transformed
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import layer_of

GEMMS, CASTS, OTHER, UPDATE, WIRE = PARTS = ("GEMMs", "casts", "other", OPTIMIZER, "collectives")
GRADIENTS = tuple(part for part in PARTS if part != UPDATE)  # of loss and gradients
_COSTS = {"xla_gpu_collect_cost_model_stats": True}
_FIRST_WITH_COSTS = (9, 0)  # the compute capability; for L40S XLA's cost model raises
_LOW_PRECISION = ("f8", "f4")


class Efficiency(NamedTuple):
    """The shares of the GPU's highest rates that kernels reach."""

    gemm: float  # of bf16's dense peak; other dtypes' GEMMs a share of this share:
    fp8: float
    fp4: float
    pallas: float  # instead of `fp8`, for the block-scaled GEMMs of this library's kernel in Triton
    mosaic: float  # and of its kernel for Hopper, in Mosaic GPU
    memory: float  # of the bandwidth
    xla: float  # the share of XLA's cost of a kernel that it takes
    link: float
    launch: float  # seconds of the smallest kernel


BEST = Efficiency(0.80, 1.00, 0.95, 0.70, 0.95, 0.95, 0.0, 0.85, 1e-6)
LIKELY = Efficiency(0.65, 0.95, 0.85, 0.48, 0.80, 0.85, 0.5, 0.75, 2e-6)
WORST = Efficiency(0.58, 0.85, 0.60, 0.35, 0.60, 0.50, 1.0, 0.60, 4e-6)


_OF_BF16 = ("fp8", "fp4", "pallas", "mosaic")  # shares of what bf16's GEMMs reach


class Cost(NamedTuple):
    """A kernel; times in seconds at the GPU's highest rates."""

    layer: str  # path with "." for "/"; "" without a layer
    part: str  # one of `PARTS`
    runs: int  # in a step
    dtype: str  # of a GEMM: "gemm", or the field of `Efficiency`; "" of other kernels
    flops: float  # time of a GEMM's FLOPs
    bytes: float
    xla: float  # time by XLA's cost model; 0 if it knows none
    sent: float  # time of the bytes on the link

    def times(self, at: Efficiency) -> dict[str, float]:
        """Seconds in a step by what limits them: the kernel takes the longest."""
        share = 1.0 if self.dtype in ("", "gemm") else getattr(at, self.dtype)
        each = {
            "FLOPs": self.flops / (at.gemm * share),
            "link": self.sent / at.link,
            "XLA's cost": self.xla * at.xla,
            "bytes": self.bytes / at.memory,
            "launch": at.launch,
        }
        return {name: seconds * self.runs for name, seconds in each.items()}

    def seconds(self, at: Efficiency) -> float:
        """Seconds in a step."""
        return max(self.times(at).values())


class Estimate(NamedTuple):
    """An estimated training step, see `estimate`."""

    recipe: str
    target: str
    devices: int
    costs: tuple[Cost, ...]

    def seconds(self, at: Efficiency = LIKELY, parts: Sequence[str] = PARTS) -> float:
        """Seconds of a step, or of its parts."""
        return sum(cost.seconds(at) for cost in self.costs if cost.part in parts)

    def speedup(self, of: "Estimate", parts: Sequence[str] = PARTS) -> tuple[float, float, float]:
        """The time of another estimate over this one's: likely, lowest and highest.

        The two have the same `Efficiency`. The bounds are over all combinations of `BEST` and `WORST` for
        bf16's GEMMs, for what GEMMs of other dtypes reach of that, and for all other kernels.
        """

        def ratio(at: Efficiency) -> float:
            return of.seconds(at, parts) / self.seconds(at, parts)

        corners = [
            others._replace(gemm=gemm.gemm, **{name: getattr(quantized, name) for name in _OF_BF16})
            for gemm, quantized, others in itertools.product((BEST, WORST), repeat=3)
        ]
        found = [ratio(LIKELY), *map(ratio, corners)]
        return found[0], min(found), max(found)


def estimate(
    subject: Subject, recipe: Recipe | str, *, target: str | targets.Target, devices: int = 1, stage: int = 0
) -> Estimate:
    """The time of a training step, compiled and not run.

    Args:
        subject: a model with one device's inputs and a loss; `subject("layer")` gives one.
        recipe: a `Recipe`, or the text of one.
        target, devices, stage: as in `fp8jax.inspect.memory.plan`.

    Raises:
        TypeError: see `fp8jax.transform`.
        ValueError: the recipe cannot be parsed; no such target or stage; the target lacks the recipe's GEMMs,
            or its peak is not known.
        RuntimeError: the packages that compile for a target are missing.
    """
    gpu, recipe = targets.get(target), Recipe.parse(recipe)
    if not gpu.flops or not gpu.link:
        raise ValueError(f"`target`: expected a GPU with `flops` and `link`, for an estimate; got {gpu}.")
    loss_fn, args = loss_of(transformed(subject.model, recipe), subject.inputs, subject.loss)
    where: dict[str, Any] = {"target": gpu, "devices": devices}
    step = training_step(loss_fn, *args, recipe=recipe, stage=stage, **where)
    lowered = targets.lower_for(step.function, *step.args, donate_argnums=(0, 1), **where)
    options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    options |= _COSTS if gpu.capability >= _FIRST_WITH_COSTS else {}
    return of_program(targets.compile(lowered, gpu, **options).as_text(), str(recipe), gpu, devices)


def of_program(text: str | None, recipe: str, target: targets.Target, devices: int = 1) -> Estimate:
    """The estimate of a compiled program's text."""
    costs = (_cost(kernel, target, devices) for kernel in kernels_of(parse(text)))
    return Estimate(recipe, target.name, devices, tuple(costs))


def _cost(kernel: Launch, gpu: targets.Target, devices: int) -> Cost:
    line, gemm = kernel.instruction, kernel.gemm
    sent = sum(each.sent(devices) for each in collectives_of(Executed(line, 1, "")))
    priced = float(line.find(r'"memory_access_time_us":([\d.e+-]+),"name":""') or "inf") * 1e-6
    xla = float(line.find(r'"exec_time_us":([\d.e+-]+)[^{}]*"name":"sol"') or 0) * 1e-6
    dtype, peak = "", gpu.flops
    if gemm:
        bits = max(Array(operand, ()).bits for operand in (gemm.lhs, gemm.rhs))
        dtype = gemm.share or {4: "fp4", 8: "fp8"}.get(bits, "gemm")
        peak *= 16 / bits
    return Cost(
        layer=layer_of(kernel.name) or "",
        part=_part(kernel, bool(sent)),
        runs=kernel.runs,
        dtype=dtype,
        flops=gemm.flops / peak if gemm else 0.0,
        bytes=min(kernel.moved / gpu.bandwidth, priced if xla and not gemm else math.inf),
        xla=0.0 if gemm else xla,
        sent=sent / gpu.link,
    )


def _part(kernel: Launch, is_sent: bool) -> str:
    arrays = [array for each in (kernel.instruction, *kernel.instruction.operands) for array in each.arrays]
    if is_sent:
        return WIRE
    if kernel.gemm:
        return GEMMS
    if f"/{OPTIMIZER}/" in kernel.name:
        return UPDATE
    is_cast = re.search(r"/cast_|jit\(_dot\)", kernel.name) or any(
        a.dtype.startswith(_LOW_PRECISION) for a in arrays
    )
    return CASTS if is_cast else OTHER
