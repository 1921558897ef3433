"""A compiled program's GEMMs, collectives, kernels and memory.

    read = program.read(jax.jit(step).lower(*args).compile())
    read.count("cublaslt_f8"), read.kernels, read.temporaries

XLA turns a matched FP8 dot product into the custom call `__cublas$lt$matmul$f8`, and an unmatched one into a
slower GEMM, without a warning: only the optimized program says which.
"""

import math
import re
from typing import Any, NamedTuple

import jax

from fp8jax.backends import BACKENDS, Call
from fp8jax.inspect.program.hlo import Array, Executed, Instruction, Module, parse

_COLLECTIVES = ("all-reduce", "all-to-all", "all-gather", "reduce-scatter", "collective-permute")


class Gemm(NamedTuple):
    """One GEMM of the program."""

    kind: str  # of a backend's `Call`, "triton" (a fusion), or "dot" (left to the code generator)
    lhs: str  # XLA's names of the dtypes: "f8e4m3fn", "bf16", ...
    rhs: str
    out: str
    out_shape: tuple[int, ...]
    fast: bool  # sums may be accumulated in less than float32 (precision DEFAULT)
    runs: int  # how often it runs in one call: trip counts of the loops around it; 1 where unknown
    name: str  # where JAX traced it, e.g. "jit(step)/jvp(Dense_0)/dot_general"
    blocks: tuple[
        str, ...
    ] = ()  # of `read_lowered`: block and scale of each block-scaled operand, "1x128 f32"
    flops: int = 0  # of one run, two per multiplication
    share: str = ""  # of a backend's `Call`

    @property
    def is_fp8(self) -> bool:
        """Whether both operands are FP8 or FP4."""
        return self.lhs.startswith(("f8", "f4")) and self.rhs.startswith(("f8", "f4"))


class Collective(NamedTuple):
    """One array that crosses between devices."""

    kind: str  # "all-reduce", "all-to-all", ...
    dtype: str  # XLA's name
    numbers: int  # elements of its result on each device
    runs: int = 1  # as `Gemm.runs`

    def sent(self, devices: int) -> float:
        """Bytes that each of `devices` devices sends if the collective goes around a ring."""
        around = (devices - 1) / devices
        factors = {"all-reduce": 2 * around, "reduce-scatter": devices - 1.0, "collective-permute": 1.0}
        return factors.get(self.kind, around) * self.runs * Array(self.dtype, (self.numbers,)).bytes


class Launch(NamedTuple):
    """One launch: a fusion, a library call, a copy or a collective."""

    gemm: Gemm | None  # None for all other kernels
    moved: int  # bytes of all operands and results, each in whole
    runs: int  # as `Gemm.runs`
    name: str  # where JAX traced it
    instruction: Instruction


class CompiledProgram(NamedTuple):
    """A compiled program, see `read`."""

    gemms: tuple[Gemm, ...]
    collectives: tuple[Collective, ...]
    kernels: int  # launches, those of a loop's body counted once
    moved: int  # bytes that kernels read and write, those of a loop's body counted once
    temporaries: int  # bytes besides arguments and outputs
    arguments: int  # bytes
    outputs: int  # bytes
    donated: int  # bytes of arguments that outputs reuse

    @property
    def total(self) -> int:
        """Peak bytes. Compare totals, not temporaries: XLA also computes in the outputs' buffers."""
        return self.arguments + self.outputs - self.donated + self.temporaries

    def sent(self, devices: int) -> int:
        """Bytes that each of `devices` devices sends in one call, see `Collective.sent`."""
        return round(sum(each.sent(devices) for each in self.collectives))

    def count(self, *kinds: str) -> int:
        """Number of GEMMs of these kinds, by default of all."""
        return sum(not kinds or gemm.kind in kinds for gemm in self.gemms)

    def __str__(self) -> str:
        kinds = dict.fromkeys(gemm.kind for gemm in self.gemms)
        gemms = ", ".join(f"{self.count(kind)} {kind}" for kind in kinds) or "no"
        return f"{gemms} GEMMs, {self.kernels} kernels, {self.temporaries / 1e9:.3f} GB of temporaries"


def read(compiled: jax.stages.Compiled) -> CompiledProgram:
    """Reads a compiled program.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()` or `targets.compile_for`, on any platform.

    Returns:
        The program's GEMMs and collectives in order of appearance, its kernels and its memory.

    Raises:
        ValueError: the text has no entry computation.
    """
    module = parse(compiled.as_text())
    kernels = kernels_of(module)
    memory: Any = compiled.memory_analysis()
    return CompiledProgram(
        gemms=tuple(kernel.gemm for kernel in kernels if kernel.gemm),
        collectives=tuple(each for executed in module.executed() for each in collectives_of(executed)),
        kernels=len(kernels),
        moved=sum(kernel.moved for kernel in kernels),
        temporaries=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        donated=memory.alias_size_in_bytes,
    )


def kernels_of(module: Module) -> tuple[Launch, ...]:
    """The kernels of a program in order of appearance."""
    kernels = []
    for instruction, runs, _ in module.executed():
        if instruction.is_kernel:
            gemm = gemm_of(module, instruction, runs)
            # A library call in a fusion reads slices of the fusion's operands.
            inner = next(filter(_library, module.inside(instruction)), instruction)
            # A library call's workspace does not count.
            results = [inner.first] if gemm else inner.arrays
            operands = [array for operand in inner.operands for array in operand.arrays]
            moved = sum(array.bytes for array in (*results, *operands))
            kernels.append(Launch(gemm, moved, runs, instruction.op_name, instruction))
    return tuple(kernels)


def collectives_of(executed: Executed) -> list[Collective]:
    """The arrays that an instruction sends between devices."""
    instruction = executed.instruction
    kind, arrays = instruction.opcode.removesuffix("-start"), instruction.arrays
    if kind not in _COLLECTIVES:
        return []
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # the operands precede the results
    return [Collective(kind, dtype, math.prod(dims), executed.runs) for dtype, dims in arrays]


def _library(instruction: Instruction) -> Call | None:
    """The library call of a GEMM; None of other instructions."""
    if instruction.opcode != "custom-call":
        return None
    target = instruction.find(r'custom_call_target="([^"]*)"')
    return {call.target: call for backend in BACKENDS.values() for call in backend.calls}.get(target)


def gemm_of(module: Module, instruction: Instruction, runs: int = 1) -> Gemm | None:
    """The GEMM of an instruction: a dot, a library call or a fusion around one. None if it is no GEMM."""
    gemms = (inner for inner in module.inside(instruction) if inner.opcode == "dot" or _library(inner))
    if (dot := next(gemms, None)) is None:
        return None
    own = "triton" if dot is not instruction and "__triton" in instruction.line else "dot"
    call = _library(dot) or Call("", own)
    if call.is_kernel and not dot.operands[0].first.dtype.startswith("f8"):
        return None  # another kernel
    lhs, rhs = dot.operands[0].first, dot.operands[call.rhs].first
    if call.is_kernel:
        flops = 2 * math.prod(dot.first.dims) * lhs.dims[-1]
    else:
        flops = _flops(lhs, rhs, dot.first, _batch_axes(dot))
    # An attribute of a dot, or a field of a library call's configuration: the precision of each operand.
    precisions = set(re.findall(r"\w+", dot.find(r"operand_precision\W+([^\]}]*)")))
    return Gemm(
        kind=call.kind,
        lhs=lhs.dtype,
        rhs=rhs.dtype,
        out=instruction.first.dtype,
        out_shape=instruction.first.dims,
        fast=precisions <= {"DEFAULT", "default"} and "use_split_accumulator = true" not in dot.line,
        runs=runs,
        name=dot.op_name,
        flops=flops,
        share=call.share,
    )


def _batch_axes(dot: Instruction) -> list[int]:
    """The axes of the first operand that all operands have."""
    if dot.opcode == "custom-call" and "dot_dimension_numbers" not in dot.line:
        return list(range(len(dot.first.dims) - 2))  # of cuDNN and TransformerEngine
    return [int(axis) for axis in re.findall(r"\d+", dot.find(r"lhs_batch_dim\w+\W*?[\[{]([^\]}]*)"))]


def _flops(lhs: Array, rhs: Array, out: Array, batch_axes: list[int]) -> int:
    """Two per multiplication: (batch, m, k) x (batch, k, n) is (batch, m, n)."""
    sizes = math.prod(lhs.dims) * math.prod(rhs.dims) * math.prod(out.dims)
    return 2 * math.isqrt(sizes // max(1, math.prod(lhs.dims[axis] for axis in batch_axes)))
