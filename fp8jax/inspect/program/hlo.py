"""HLO text, parsed: a module of computations, a computation of instructions."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Opcodes that launch no kernel: values in place, or control flow.
_NO_KERNEL = frozenset(
    "add-dependency after-all async-start bitcast call conditional constant get-tuple-element opt-barrier "
    "parameter partition-id replica-id tuple while".split()
)

_BITS = {"f8e4m3fn": 8, "f8e5m2": 8, "u8": 8, "s8": 8, "pred": 8, "bf16": 16, "f16": 16, "u16": 16, "s16": 16}
_BITS |= {"f64": 64, "s64": 64}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # as printed: "bf16[8,16]{1,0}", or a tuple of such shapes
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def is_kernel(self) -> bool:
        """Whether the instruction launches work: a fusion, a library call, a copy or a collective."""
        # The start of an asynchronous pair is the launch, and its end a wait.
        return self.opcode not in _NO_KERNEL and not self.opcode.endswith(("-done", "-update"))

    @property
    def called(self) -> list[str]:
        """The computations that the instruction executes. A fusion executes none: it is one kernel."""
        if self.opcode not in ("while", "call", "conditional", "async-start"):
            return []
        names = re.findall(r"(?:condition|body|to_apply|calls|\w+_computation)=%([\w.\-]+)", self.line)
        return names + re.findall(r"%([\w.\-]+)", self.find(r"branch_computations=\{([^}]*)\}"))

    @property
    def trip_count(self) -> int:
        """How often a loop runs; 1 where XLA does not know, and for every other instruction."""
        return int(self.find(r'"known_trip_count":\{"n":"(\d+)"\}') or 1) if self.opcode == "while" else 1

    @property
    def op_name(self) -> str:
        """Where JAX traced it, as in "jit(step)/jvp(Dense_0)/dot_general"; "" if unknown."""
        return self.find(r'op_name="([^"]*)"')

    def find(self, pattern: str) -> str:
        """The first group of a regular expression in the line; "" where nothing matches."""
        found = re.search(pattern, self.line)
        return found[1] if found else ""


Computation = dict[str, Instruction]  # instructions by name, in their order


class Module(NamedTuple):
    """The computations of a program by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def kernels(self) -> Iterator[tuple[Instruction, Computation, int]]:
        """Each kernel, its computation, and how often it runs: the product of known trip counts."""
        return self._kernels(self.entry, 1)

    def _kernels(self, name: str, runs: int) -> Iterator[tuple[Instruction, Computation, int]]:
        body = self.computations[name]
        for instruction in body.values():
            if instruction.is_kernel:
                yield instruction, body, runs
            for called in instruction.called:
                yield from self._kernels(called, runs * instruction.trip_count)

    def fused(self, instruction: Instruction) -> Computation:
        """The instructions inside a fusion; empty for every other instruction."""
        called = instruction.find(r"calls=%([\w.\-]+)") if instruction.opcode == "fusion" else ""
        return self.computations.get(called, {})


def parse(text: str | None) -> Module:
    """Parses the text of a compiled or lowered program.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in (text or "").splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)):
            current[found[1]] = _instruction(found[1], found[2])
    if entry is None:
        raise ValueError("`compiled`: expected the text of an HLO module; it has no ENTRY computation.")
    return Module(computations, entry)


def _instruction(name: str, line: str) -> Instruction:
    """Splits `bf16[8]{0} add(%a, %b), metadata=...` into its parts."""
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, _, _ = line[end + 1 :].partition("(")
    start = end + 1 + len(opcode)
    operands = re.findall(r"%([\w.\-]+)", line[start : _closing(line, start)])
    return Instruction(name, line[:end], opcode.strip(), tuple(operands), line)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dimensions of each array in a printed shape, which may be a tuple."""
    found = re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, tuple(int(dim) for dim in dims.split(",") if dim)) for dtype, dims in found]


def first_of(shape: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and dimensions of the first array; a library call's workspace follows its result."""
    return next(iter(arrays_of(shape)), ("", ()))


def bits_of(dtype: str) -> int:
    """Bits of a number of this dtype, by XLA's name."""
    return _BITS.get(dtype, 32)


def bytes_of(shape: str, *, first: bool = False) -> int:
    """Bytes of a printed shape: of all arrays of a tuple, or of the first."""
    sizes = [bits_of(dtype) // 8 * math.prod(dims) for dtype, dims in arrays_of(shape)]
    return sum(sizes[:1] if first else sizes)
