"""A compiled program's GEMMs, collectives, kernels and memory.

    read = program.read(jax.jit(step).lower(*args).compile())
    read.count("cublaslt_f8"), read.kernels, read.temporaries

`gemms` says which of its instructions are GEMMs.
"""

import math
from typing import Any, NamedTuple

import jax

from fp8jax.inspect.program.gemms import Gemm, call_of, gemm_of
from fp8jax.inspect.program.hlo import Array, Executed, Instruction, Module, parse

_COLLECTIVES = ("all-reduce", "all-to-all", "all-gather", "reduce-scatter", "collective-permute")


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
            inner = next(filter(call_of, module.inside(instruction)), instruction)
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
