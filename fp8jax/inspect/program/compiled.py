"""What a compiled program does, read from its text: which GEMMs, how many kernels, how many bytes.

    read = program.read(jax.jit(step).lower(*args).compile())
    read.count("cublaslt_f8"), read.kernels, read.temporaries

A recipe says what should run in FP8; only the optimized program says what does. XLA turns a matched
product into the custom call `__cublas$lt$matmul$f8` and an unmatched one into something slower, silently.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from fp8jax.inspect.program.text import (
    BITS,
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

# Custom call -> kind of GEMM. Other kinds: "triton" (a GEMM fusion), "dot" (left to the code generator).
_CALLS = {
    "__cublas$lt$matmul$f8": "cublaslt_f8",
    "__cublas$lt$matmul": "cublaslt",
    "__cublas$gemm": "cublas",
    "__onednn$matmul": "onednn",
    "te_gemm_v2_ffi": "te",  # TransformerEngine's
}


class Gemm(NamedTuple):
    """One matrix product of the program."""

    kind: str  # "cublaslt_f8", "cublaslt", "cublas", "onednn", "te", "triton" or "dot"
    lhs: str  # XLA's names of the dtypes: "f8e4m3fn", "bf16", ...
    rhs: str
    out: str
    out_shape: tuple[int, ...]
    fast: bool  # products may be accumulated in less than float32 (precision DEFAULT)
    runs: int  # how often it runs in one call: trip counts of the loops around it; 1 where unknown
    name: str  # where it comes from, e.g. "jit(step)/jvp(Dense_0)/dot_general"
    flops: int  # 2 m n k, of all matrices of a batch; the zeros of a padding count too

    @property
    def is_fp8(self) -> bool:
        """Whether it multiplies FP8 operands."""
        return self.lhs.startswith("f8") and self.rhs.startswith("f8")


class Collective(NamedTuple):
    """One array that crosses between devices."""

    kind: str  # "all-reduce", "all-to-all", ...
    dtype: str  # XLA's name
    numbers: int  # elements of its result on each device
    runs: int = 1  # how often it runs in one call: trip counts of the loops around it; 1 where unknown

    def sent(self, devices: int) -> float:
        """Bytes that one of `devices` devices sends if the collective goes around a ring of them."""
        around = (devices - 1) / devices
        factors = {"all-reduce": 2 * around, "reduce-scatter": devices - 1.0, "collective-permute": 1.0}
        return factors.get(self.kind, around) * self.runs * bytes_of(f"{self.dtype}[{self.numbers}]")


class Program(NamedTuple):
    """A compiled program as this module reads it; see `read`."""

    gemms: tuple[Gemm, ...]
    collectives: tuple[Collective, ...]
    kernels: int  # instructions that launch work on the device, loop bodies counted once
    moved: int  # bytes that they read and write, every operand and result in whole, loop bodies counted once
    temporaries: int  # bytes besides arguments and outputs
    arguments: int  # bytes
    outputs: int  # bytes
    donated: int  # bytes of arguments that outputs took over

    @property
    def total(self) -> int:
        """Bytes in all. Temporaries alone mislead: XLA also computes in the outputs' buffers."""
        return self.arguments + self.outputs - self.donated + self.temporaries

    def sent(self, devices: int) -> int:
        """Bytes that one of `devices` devices sends in one call, see `Collective.sent`."""
        return round(sum(each.sent(devices) for each in self.collectives))

    def count(self, *kinds: str) -> int:
        """Number of GEMMs of these kinds, or of all."""
        return sum(not kinds or gemm.kind in kinds for gemm in self.gemms)

    def __str__(self) -> str:
        kinds = dict.fromkeys(gemm.kind for gemm in self.gemms)
        gemms = ", ".join(f"{self.count(kind)} {kind}" for kind in kinds) or "no"
        return f"{gemms} GEMMs, {self.kernels} kernels, {self.temporaries / 1e9:.3f} GB of temporaries"


def read(compiled: Any) -> Program:
    """Reads a compiled program.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` gives, on any platform.

    Returns:
        The program's GEMMs and collectives in order of appearance, and its costs. A kernel is an instruction
        of the entry computation, or of what it calls or loops over, that launches work: a fusion, a library
        call, a copy, a collective. A loop's body counts once, whatever its trip count.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations, entry = parse(compiled.as_text())
    gemms: list[Gemm] = []
    collectives: list[Collective] = []
    kernels, moved = _walk(computations, entry, 1, gemms, collectives)
    memory = compiled.memory_analysis()
    return Program(
        gemms=tuple(gemms),
        collectives=tuple(collectives),
        kernels=kernels,
        moved=moved,
        temporaries=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        donated=memory.alias_size_in_bytes,
    )


def read_lowered(lowered: Any) -> tuple[Gemm, ...]:
    """The GEMMs of a program before it is optimized, for platforms that multiply FP8 in a wider format.

    Args:
        lowered: what `jax.jit(f).lower(...)` gives.

    Returns:
        As `Program.gemms`; but an operand's dtype is the narrowest that it had on its way from where it was
        computed to the product: E4M3 codes that were widened and scaled are "f8e4m3fn". Trip counts of loops
        are not known yet: `runs` is 1.
    """
    text = lowered.compiler_ir(dialect="hlo").get_hlo_module().to_string()
    computations, entry = parse(text)
    return tuple(_given(computations, entry, ""))


def _given(computations: dict[str, list[Instruction]], name: str, outer: str) -> Iterator[Gemm]:
    """The dots of a computation, once for each place that calls it. Inside of a called function names begin
    anew: `outer` is the name of the call."""
    body = computations[name]
    by_name = {instruction.name: instruction for instruction in body}
    shapes = {instruction.name: instruction.shape for instruction in body}
    for instruction in body:
        if instruction.opcode == "dot":
            gemm = _gemm("dot", instruction, shapes, computations, 1)
            lhs, rhs = (_narrowest(by_name, operand) for operand in instruction.operands)
            yield gemm._replace(lhs=lhs, rhs=rhs, name=f"{outer}{gemm.name}")
        is_call = instruction.opcode == "call"
        for called in executed(instruction):
            yield from _given(computations, called, f"{outer}{op_name(instruction)}/" if is_call else outer)


# What an array may pass through and still have its values, but for a scale.
_PASSED = frozenset("bitcast-convert convert copy multiply opt-barrier reshape transpose".split())


def _narrowest(by_name: dict[str, Instruction], name: str) -> str:
    dtypes = []
    while name in by_name:
        instruction = by_name[name]
        if instruction.opcode == "get-tuple-element":  # of a barrier of a tuple
            barrier = by_name[instruction.operands[0]]
            parts = by_name.get(barrier.operands[0]) if barrier.opcode == "opt-barrier" else None
            if parts is None or parts.opcode != "tuple":
                break
            (index,) = re.findall(r"index=(\d+)", instruction.line)
            name = parts.operands[int(index)]
            continue
        dtypes.append(dtype_of(instruction.shape))
        if instruction.opcode not in _PASSED:
            break
        name = instruction.operands[0]
    return min(
        (dtype for dtype in dtypes if dtype[0] in "fb"), key=lambda dtype: BITS.get(dtype, 32), default=""
    )


def _collectives(instruction: Instruction) -> list[Collective]:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in ("all-reduce", "all-to-all", "all-gather", "reduce-scatter", "collective-permute"):
        return []
    shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", instruction.shape)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        shapes = shapes[len(shapes) // 2 :]  # its operands stand before its results
    return [
        Collective(kind, dtype, math.prod(map(int, filter(None, dims.split(","))))) for dtype, dims in shapes
    ]


def _walk(
    computations: dict[str, list[Instruction]],
    name: str,
    runs: int,
    gemms: list[Gemm],
    collectives: list[Collective],
) -> tuple[int, int]:
    """Appends the GEMMs and collectives of a computation that is executed; returns its kernels and the bytes
    that they move."""
    kernels = moved = 0
    shapes = {instruction.name: instruction.shape for instruction in computations[name]}
    for instruction in computations[name]:
        if gemm := gemm_of(instruction, shapes, computations, runs):
            gemms.append(gemm)
        collectives += [found._replace(runs=runs) for found in _collectives(instruction)]
        if launches(instruction):
            kernels += 1
            moved += sum(
                map(bytes_of, [instruction.shape, *(shapes.get(o, "") for o in instruction.operands)])
            )
        for called in executed(instruction):
            below = _walk(computations, called, runs * trip_count(instruction), gemms, collectives)
            kernels, moved = kernels + below[0], moved + below[1]
    return kernels, moved


def gemm_of(
    instruction: Instruction, shapes: dict[str, str], computations: dict[str, list[Instruction]], runs: int
) -> Gemm | None:
    """The GEMM that the instruction is, or None; `shapes` are those of its operands."""
    kind = _kind(instruction, computations)
    return _gemm(kind, instruction, shapes, computations, runs) if kind else None


def _kind(instruction: Instruction, computations: dict[str, list[Instruction]]) -> str | None:
    """The kind of GEMM that the instruction is, or None."""
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
        return _CALLS.get(target[1]) if target else None
    if instruction.opcode == "dot":
        return "dot"
    if instruction.opcode == "fusion" and _inner_dot(instruction, computations):
        return "triton" if "__triton" in instruction.line else "dot"
    return None


def _inner_dot(
    instruction: Instruction, computations: dict[str, list[Instruction]]
) -> tuple[Instruction, dict[str, str]] | None:
    """The dot inside a fusion, with the shapes around it."""
    called = re.search(r"calls=%([\w.\-]+)", instruction.line)
    body = computations.get(called[1], []) if called else []
    for inner in body:
        if inner.opcode == "dot":
            return inner, {other.name: other.shape for other in body}
        if inner.opcode == "fusion" and (found := _inner_dot(inner, computations)):
            return found
    return None


def _gemm(
    kind: str,
    instruction: Instruction,
    shapes: dict[str, str],
    computations: dict[str, list[Instruction]],
    runs: int,
) -> Gemm:
    out = instruction.shape
    if instruction.opcode == "fusion":
        instruction, shapes = _inner_dot(instruction, computations) or (instruction, shapes)
    stride = 2 if kind == "te" else 1  # each operand's scale comes after it
    lhs, rhs = (shapes.get(operand, "") for operand in instruction.operands[: 2 * stride : stride])
    fast = set(_precision(instruction.line)) <= {"DEFAULT", "default"}
    return Gemm(
        kind=kind,
        lhs=dtype_of(lhs),
        rhs=dtype_of(rhs),
        out=dtype_of(out),
        out_shape=dims_of(out),
        fast=fast and "use_split_accumulator = true" not in instruction.line,
        runs=runs,
        name=op_name(instruction),
        flops=_flops(instruction, lhs, rhs),
    )


def _flops(product: Instruction, lhs: str, rhs: str) -> int:
    """2 m n k of a product of matrices, or of all of a batch of b: |lhs| |rhs| |out| is b**3 (m n k)**2."""
    numbers = math.prod(math.prod(dims_of(shape)) for shape in (lhs, rhs, product.shape))
    # As a dot's attribute says it, or a library call's configuration.
    batched = re.search(r'lhs_batch_dim(?:s=\{|ensions":\[)([^\]}]*)', product.line)
    batch = math.prod(dims_of(lhs)[int(dim)] for dim in re.findall(r"\d+", batched[1])) if batched else 1
    return 2 * math.isqrt(numbers // batch) if batch else 0


def _precision(line: str) -> list[str]:
    """The precision of each operand, as a library call's configuration or a dot's attribute says it."""
    found = re.search(r'"operand_precision":(\[[^\]]*\])', line)
    if found:
        return json.loads(found[1])
    found = re.search(r"operand_precision=\{([^}]*)\}", line)
    return found[1].split(",") if found else []
