"""Bytes that a compiled program's kernels move, and its casts and transposes of FP8 tensors.

    found = traffic.read(compiled)
    found.other, found.gemms, found.most_casts, found.most_transposes

Each operand of an FP8 GEMM should be cast once, and transposed at most once: GPUs before Blackwell take FP8
operands only with the contracted dimension last in memory, and the GEMM of a weight gradient contracts
another dimension than the other two GEMMs.
"""

import collections
import re
from typing import NamedTuple

import jax

from fp8jax.inspect.program.compiled import Launch, kernels_of
from fp8jax.inspect.program.hlo import Instruction, parse


class Traffic(NamedTuple):
    """The bytes that a program's kernels move; a kernel in a loop counts as often as it runs."""

    kernels: tuple[Launch, ...]
    casts: dict[str, int]  # FP8 tensor -> places in the program that cast it from a wider format
    transposes: dict[str, int]  # FP8 tensor -> kernels that transpose it

    @property
    def gemms(self) -> int:
        """Bytes that GEMMs read and write."""
        return sum(kernel.moved * kernel.runs for kernel in self.kernels if kernel.gemm)

    @property
    def other(self) -> int:
        """Bytes that all other kernels read and write."""
        return self.outside("")

    def outside(self, scope: str) -> int:
        """`other` without the kernels that were traced in a named scope; "" leaves none out."""
        return sum(
            kernel.moved * kernel.runs
            for kernel in self.kernels
            if not kernel.gemm and not (scope and f"/{scope}/" in f"{kernel.name}/")
        )

    @property
    def most_casts(self) -> int:
        """The number of casts of the tensor that is cast most often."""
        return max(self.casts.values(), default=0)

    @property
    def most_transposes(self) -> int:
        """The number of transposes of the tensor that is transposed most often."""
        return max(self.transposes.values(), default=0)


def read(compiled: jax.stages.Compiled) -> Traffic:
    """Reads the traffic of a compiled program. A kernel that reads a slice counts the whole operand."""
    module = parse(compiled.as_text())
    casts, transposes = collections.Counter(), collections.Counter()
    for instruction, _, _ in module.executed():
        if not instruction.is_kernel:
            continue
        inside = list(module.inside(instruction))
        # Each tensor once, though a kernel may write it twice. Scalars, such as constants, do not count.
        casts.update({_tensor(inner) for inner in inside if _is_cast(inner)})
        if len(instruction.operands) == 1 and _is_transpose(inside):
            transposes[_source(instruction.operands[0]).name] += 1
    return Traffic(kernels_of(module), dict(casts), dict(transposes))


def _is_cast(instruction: Instruction) -> bool:
    dtype, dims = instruction.first
    return instruction.opcode == "convert" and dtype.startswith("f8") and dims != ()


def _tensor(cast: Instruction) -> str:
    """The tensor that is cast: layer and operand, without the names that remat and autodiff add."""
    found = re.search(r"fp8jax:([^/]+).*?/(cast_\w+)", cast.op_name)
    return f"{found[1]} {found[2]}" if found else cast.op_name


def _is_transpose(inside: list[Instruction]) -> bool:
    """Whether a kernel only moves the bytes of an FP8 tensor."""
    inside = [inner for inner in inside if inner.opcode not in ("parameter", "bitcast")]
    moves = [inner for inner in inside if inner.opcode in ("transpose", "copy")]
    if not moves or moves[0].first.dtype not in ("f8e4m3fn", "f8e5m2", "u8"):
        return False
    return all(inner in moves or inner.opcode in ("bitcast-convert", "reshape") for inner in inside)


def _source(tensor: Instruction) -> Instruction:
    """The tensor behind bitcasts and barriers."""
    while tensor.opcode in ("bitcast", "bitcast-convert", "opt-barrier"):
        [tensor] = tensor.operands
    return tensor
