"""GEMMs of a program: which instructions they are, their operands, and their FLOPs.

XLA turns a matched FP8 dot product into the custom call `__cublas$lt$matmul$f8`, and an unmatched one into a
slower GEMM, without a warning: only the optimized program says which.
"""

import math
import re
from typing import NamedTuple

from fp8jax.backends import BACKENDS, Call
from fp8jax.inspect.program.hlo import Array, Instruction, Module


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


def call_of(instruction: Instruction) -> Call | None:
    """The library call of a GEMM; None of other instructions."""
    if instruction.opcode != "custom-call":
        return None
    target = instruction.find(r'custom_call_target="([^"]*)"')
    return {call.target: call for backend in BACKENDS.values() for call in backend.calls}.get(target)


def gemm_of(module: Module, instruction: Instruction, runs: int = 1) -> Gemm | None:
    """The GEMM of an instruction: a dot, a library call or a fusion around one. None if it is no GEMM."""
    gemms = (inner for inner in module.inside(instruction) if inner.opcode == "dot" or call_of(inner))
    if (dot := next(gemms, None)) is None:
        return None
    own = "triton" if dot is not instruction and "__triton" in instruction.line else "dot"
    call = call_of(dot) or Call("", own)
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
