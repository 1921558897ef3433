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


class Array(NamedTuple):
    """The type of an array."""

    dtype: str  # XLA's name
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return _BITS.get(self.dtype, 32)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.bits // 8 * math.prod(self.dims)


class Instruction(NamedTuple):
    """One line of a computation."""

    arrays: tuple[Array, ...]  # of the result
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def first(self) -> Array:
        """The first array of the result. A library call's workspace follows it."""
        return self.arrays[0] if self.arrays else Array("", ())

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


class Executed(NamedTuple):
    """An instruction that the program executes."""

    instruction: Instruction
    body: Computation  # the computation around it
    runs: int = 1  # the product of known trip counts of the loops around it
    scope: str = ""  # names of the calls around it: inside a called function, names begin anew


class Module(NamedTuple):
    """The computations of a program by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def executed(self) -> Iterator[Executed]:
        """Each instruction in order, once for each place that calls its computation."""
        return self._executed(self.entry, 1, "")

    def _executed(self, name: str, runs: int, scope: str) -> Iterator[Executed]:
        body = self.computations[name]
        for instruction in body.values():
            yield Executed(instruction, body, runs, scope)
            inner = f"{scope}{instruction.op_name}/" if instruction.opcode == "call" else scope
            for called in instruction.called:
                yield from self._executed(called, runs * instruction.trip_count, inner)

    def inside(
        self, instruction: Instruction, body: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """The instructions of a fusion and of the fusions within; any other instruction itself. Each with its
        computation."""
        called = instruction.find(r"calls=%([\w.\-]+)") if instruction.opcode == "fusion" else ""
        if called not in self.computations:
            yield instruction, body
            return
        fused = self.computations[called]
        for inner in fused.values():
            yield from self.inside(inner, fused)


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
            current[found[1]] = _instruction(found[2])
    if entry is None:
        raise ValueError("`compiled`: expected the text of an HLO module; it has no ENTRY computation.")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    """Splits `bf16[8]{0} add(%a, %b), metadata=...` into its parts."""
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", line[:end])
    opcode, _, _ = line[end + 1 :].partition("(")
    start = end + 1 + len(opcode)
    return Instruction(
        arrays=tuple(Array(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in arrays),
        opcode=opcode.strip(),
        operands=tuple(re.findall(r"%([\w.\-]+)", line[start : _closing(line, start)])),
        line=line,
    )


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)
