"""What a compiled program's kernels read and write, and how often it casts and transposes a tensor.

    traffic = program.traffic_of(compiled)
    traffic.other, traffic.gemms, traffic.casts, traffic.most_casts
    traffic.seconds(targets.get("h200"))        # a roofline's estimate

A tensor that a product takes in FP8 should be cast once, and be transposed once at most: GPUs before
Blackwell multiply FP8 only with the contracted dim last in memory, and the product of a weight gradient
contracts the dim that the others do not.
"""

import collections
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from fp8jax.inspect.program.compiled import Gemm, gemm_of
from fp8jax.inspect.program.text import (
    Instruction,
    bytes_of,
    dims_of,
    dtype_of,
    executed,
    launches,
    op_name,
    parse,
    trip_count,
)

_Computations = dict[str, list[Instruction]]


class Kernel(NamedTuple):
    """What is launched at once: a fusion, a library call, a copy."""

    gemm: Gemm | None  # which product it is, if it is one
    moved: int  # bytes of all operands and results
    runs: int  # trip counts of the loops around it; 1 where unknown
    name: str  # where it was traced
    text: str  # its name in the program, and its result

    @property
    def kind(self) -> str:
        """Of GEMM; "" for other kernels."""
        return self.gemm.kind if self.gemm else ""

    @property
    def flops(self) -> int:
        """Of a GEMM; those of other kernels are not counted."""
        return self.gemm.flops if self.gemm else 0


class Traffic(NamedTuple):
    """What the kernels of a program move; those in loops count as often as they run."""

    kernels: tuple[Kernel, ...]
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
        """`other`, without the kernels that were traced in a scope of this name; "" is none."""
        return sum(
            kernel.moved * kernel.runs
            for kernel in self.kernels
            if not kernel.gemm and not (scope and f"/{scope}/" in f"{kernel.name}/")
        )

    @property
    def most_casts(self) -> int:
        """Casts of the tensor that is cast most often."""
        return max(self.casts.values(), default=0)

    @property
    def most_transposes(self) -> int:
        """Transposes of the tensor that is transposed most often."""
        return max(self.transposes.values(), default=0)

    def seconds(self, target: Any) -> float:
        """What the program takes at the peaks of a `targets.Target`: each kernel as long as its bytes take at
        full bandwidth, or its FLOPs at the full rate, whichever is more. An estimate, without latencies."""
        return sum(_seconds(kernel, target) * kernel.runs for kernel in self.kernels)


def _seconds(kernel: Kernel, target: Any) -> float:
    rate = target.fp8_flops if kernel.gemm and kernel.gemm.is_fp8 else target.bf16_flops
    return max(kernel.moved / target.bandwidth, kernel.flops / rate)


def traffic_of(compiled: Any) -> Traffic:
    """Reads a compiled program.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` or `targets.compile_for` gives.

    Returns:
        Its `Traffic`. A kernel that reads a slice of an operand counts the whole of it.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations, entry = parse(compiled.as_text())
    casts, transposes = collections.Counter(), collections.Counter()
    kernels = []
    for instruction, body, runs in _launched(computations, entry, 1):
        kernels.append(_kernel(instruction, body, computations, runs))
        casts.update({_tensor(inner) for inner in _casts(instruction, computations)})
        if _transposes(instruction, computations):
            transposes[_source(instruction.operands[0], body)] += 1
    return Traffic(tuple(kernels), dict(casts), dict(transposes))


def _launched(
    computations: _Computations, name: str, runs: int
) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
    """What a computation launches, what stands around it, and how often it runs."""
    body = {instruction.name: instruction for instruction in computations[name]}
    for instruction in computations[name]:
        if launches(instruction):
            yield instruction, body, runs
        for called in executed(instruction):
            yield from _launched(computations, called, runs * trip_count(instruction))


def _kernel(
    instruction: Instruction, body: dict[str, Instruction], computations: _Computations, runs: int
) -> Kernel:
    shapes = {operand: body[operand].shape for operand in instruction.operands if operand in body}
    gemm = gemm_of(instruction, shapes, computations, runs)
    # A library's workspace, which follows its result, is not counted.
    result = _first(instruction.shape) if gemm else instruction.shape
    return Kernel(
        gemm=gemm,
        moved=sum(map(bytes_of, [result, *(shapes.get(operand, "") for operand in instruction.operands)])),
        runs=runs,
        name=op_name(instruction),
        text=f"{instruction.name}: {instruction.shape}",
    )


def _first(shape: str) -> str:
    """A shape as printed; of a tuple, its first element."""
    found = re.search(r"[a-z]\w*\[[\d,]*\]", shape)
    return found[0] if found else shape


def _inside(instruction: Instruction, computations: _Computations) -> list[Instruction]:
    """The instructions of a fusion, and of those within it; of anything else, itself."""
    called = re.search(r"calls=%([\w.\-]+)", instruction.line)
    if instruction.opcode != "fusion" or not called:
        return [instruction]
    return [deep for inner in computations[called[1]] for deep in _inside(inner, computations)]


def _casts(instruction: Instruction, computations: _Computations) -> list[Instruction]:
    """The casts to FP8 within a kernel. One of a few numbers, as of a constant, is none."""
    inside = _inside(instruction, computations)
    return [
        inner
        for inner in inside
        if inner.opcode == "convert" and dtype_of(inner.shape).startswith("f8") and dims_of(inner.shape)
    ]


def _tensor(cast: Instruction) -> str:
    """Which tensor a cast is of: layer and operand, without what rematerialization and autodiff add."""
    name = op_name(cast)
    found = re.search(r"fp8jax:([^/]+).*?/(cast_\w+)", name)
    return f"{found[1]} {found[2]}" if found else name


def _transposes(instruction: Instruction, computations: _Computations) -> bool:
    """Whether a kernel only moves bytes of one FP8 tensor to other places."""
    inside = [
        inner for inner in _inside(instruction, computations) if inner.opcode not in ("parameter", "bitcast")
    ]
    moves = [inner for inner in inside if inner.opcode in ("transpose", "copy")]
    others = [
        inner for inner in inside if inner.opcode not in ("transpose", "copy", "bitcast-convert", "reshape")
    ]
    is_narrow = bool(moves) and dtype_of(moves[0].shape) in ("f8e4m3fn", "f8e5m2", "u8")
    return is_narrow and not others and len(instruction.operands) == 1


def _source(name: str, body: dict[str, Instruction]) -> str:
    """The name of what was computed, behind what only passes it on."""
    while name in body and body[name].opcode in ("bitcast", "bitcast-convert", "opt-barrier"):
        name = body[name].operands[0]
    return name
