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

# Custom call -> kind of GEMM. Other kinds: "triton" (a GEMM fusion), "dot" (left to the code generator).
_CALLS = {
    "__cublas$lt$matmul$f8": "cublaslt_f8",
    "__cublas$lt$matmul": "cublaslt",
    "__cublas$gemm": "cublas",
    "__onednn$matmul": "onednn",
}

# Opcodes that launch nothing themselves: values in place, or control flow whose bodies are counted.
_NO_KERNEL = frozenset(
    "add-dependency after-all async-start bitcast call conditional constant get-tuple-element opt-barrier "
    "parameter partition-id replica-id tuple while".split()
)


class Gemm(NamedTuple):
    """One matrix product of the program."""

    kind: str  # "cublaslt_f8", "cublaslt", "cublas", "onednn", "triton" or "dot"
    lhs: str  # XLA's names of the dtypes: "f8e4m3fn", "bf16", ...
    rhs: str
    out: str
    out_shape: tuple[int, ...]
    fast: bool  # products may be accumulated in less than float32 (precision DEFAULT)
    runs: int  # how often it runs in one call: trip counts of the loops around it; 1 where unknown
    name: str  # where it comes from, e.g. "jit(step)/jvp(Dense_0)/dot_general"


class Collective(NamedTuple):
    """One array that crosses between devices."""

    kind: str  # "all-reduce", "all-to-all", ...
    dtype: str  # XLA's name
    numbers: int  # elements of its result on each device
    runs: int = 1  # how often it runs in one call: trip counts of the loops around it; 1 where unknown


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

    def count(self, *kinds: str) -> int:
        """Number of GEMMs of these kinds, or of all."""
        return sum(not kinds or gemm.kind in kinds for gemm in self.gemms)

    def __str__(self) -> str:
        kinds = dict.fromkeys(gemm.kind for gemm in self.gemms)
        gemms = ", ".join(f"{self.count(kind)} {kind}" for kind in kinds) or "no"
        return f"{gemms} GEMMs, {self.kernels} kernels, {self.temporaries / 1e9:.3f} GB of temporaries"


class _Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # as printed: "bf16[8,16]{1,0}", or a tuple of such
    opcode: str
    operands: tuple[str, ...]
    line: str


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
    computations, entry = _parse(compiled.as_text())
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
    computations, entry = _parse(text)
    return tuple(_given(computations, entry, ""))


def _given(computations: dict[str, list[_Instruction]], name: str, outer: str) -> Iterator[Gemm]:
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
        for called in _executed(instruction):
            yield from _given(computations, called, f"{outer}{_op_name(instruction)}/" if is_call else outer)


# What an array may pass through and still have its values, but for a scale.
_PASSED = frozenset("bitcast-convert convert copy multiply opt-barrier reshape transpose".split())

_BITS = {"f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16, "f16": 16, "u16": 16, "s16": 16, "f64": 64, "s64": 64}


def _narrowest(by_name: dict[str, _Instruction], name: str) -> str:
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
        dtypes.append(_dtype(instruction.shape))
        if instruction.opcode not in _PASSED:
            break
        name = instruction.operands[0]
    return min(
        (dtype for dtype in dtypes if dtype[0] in "fb"), key=lambda dtype: _BITS.get(dtype, 32), default=""
    )


def _collectives(instruction: _Instruction) -> list[Collective]:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in ("all-reduce", "all-to-all", "all-gather", "reduce-scatter", "collective-permute"):
        return []
    shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", instruction.shape)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        shapes = shapes[len(shapes) // 2 :]  # its operands stand before its results
    return [
        Collective(kind, dtype, math.prod(map(int, filter(None, dims.split(","))))) for dtype, dims in shapes
    ]


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The computations of the text by name, and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)):
            current.append(_instruction(found[1], found[2]))
    if entry is None:
        raise ValueError("`compiled`: expected the text of an HLO module; it has no ENTRY computation.")
    return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
    """`bf16[8]{0} add(%a, %b), metadata=...` in its parts."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[end + 1 :].partition("(")
    start = end + 1 + len(opcode)
    operands = re.findall(r"%([\w.\-]+)", rest[start : _closing(rest, start)])
    return _Instruction(name, rest[:end], opcode.strip(), tuple(operands), rest)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _walk(
    computations: dict[str, list[_Instruction]],
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
        if kind := _kind(instruction, computations):
            gemms.append(_gemm(kind, instruction, shapes, computations, runs))
        collectives += [found._replace(runs=runs) for found in _collectives(instruction)]
        if _launches(instruction):
            kernels += 1
            moved += sum(map(_bytes, [instruction.shape, *(shapes.get(o, "") for o in instruction.operands)]))
        for called in _executed(instruction):
            below = _walk(computations, called, runs * _trip_count(instruction), gemms, collectives)
            kernels, moved = kernels + below[0], moved + below[1]
    return kernels, moved


def _bytes(shape: str) -> int:
    """Size of a shape as printed, all elements of a tuple together."""
    return sum(
        max(_BITS.get(dtype, 8 if dtype in ("u8", "s8", "pred") else 32) // 8, 1)
        * math.prod(map(int, filter(None, dims.split(","))))
        for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    )


def _launches(instruction: _Instruction) -> bool:
    opcode = instruction.opcode
    # The start of an asynchronous pair is the launch, its end a wait.
    return opcode not in _NO_KERNEL and not opcode.endswith(("-done", "-update"))


def _executed(instruction: _Instruction) -> list[str]:
    """Computations that the instruction runs as programs of their own (a fusion's is one kernel)."""
    if instruction.opcode not in ("while", "call", "conditional", "async-start"):
        return []
    names = re.findall(r"(?:condition|body|to_apply|calls|\w+_computation)=%([\w.\-]+)", instruction.line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.line)
    return names + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])


def _trip_count(instruction: _Instruction) -> int:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.line)
    return int(found[1]) if found and instruction.opcode == "while" else 1


def _kind(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> str | None:
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
    instruction: _Instruction, computations: dict[str, list[_Instruction]]
) -> tuple[_Instruction, dict[str, str]] | None:
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
    instruction: _Instruction,
    shapes: dict[str, str],
    computations: dict[str, list[_Instruction]],
    runs: int,
) -> Gemm:
    out = instruction.shape
    if instruction.opcode == "fusion":
        instruction, shapes = _inner_dot(instruction, computations) or (instruction, shapes)
    lhs, rhs = (_dtype(shapes.get(operand, "")) for operand in instruction.operands[:2])
    dims = re.search(r"\[([\d,]*)\]", out)
    return Gemm(
        kind=kind,
        lhs=lhs,
        rhs=rhs,
        out=_dtype(out),
        out_shape=tuple(int(dim) for dim in dims[1].split(",") if dim) if dims else (),
        fast=set(_precision(instruction.line)) <= {"DEFAULT", "default"},
        runs=runs,
        name=_op_name(instruction),
    )


def _op_name(instruction: _Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', instruction.line)
    return found[1] if found else ""


def _dtype(shape: str) -> str:
    """The dtype of a shape as printed; of a tuple, that of its first element (the rest is workspace)."""
    found = re.search(r"([a-z]\w*)\[", shape)
    return found[1] if found else ""


def _precision(line: str) -> list[str]:
    """The precision of each operand, as a library call's configuration or a dot's attribute says it."""
    found = re.search(r'"operand_precision":(\[[^\]]*\])', line)
    if found:
        return json.loads(found[1])
    found = re.search(r"operand_precision=\{([^}]*)\}", line)
    return found[1].split(",") if found else []
