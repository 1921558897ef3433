"""HLO text, parsed: a module of computations, a computation of instructions."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Opcodes that launch no kernel: values in place, or control flow.
_NO_KERNEL = frozenset(
    "add-dependency after-all async-start bitcast call conditional constant get-tuple-element opt-barrier "
    "parameter partition-id replica-id tuple while".split()
)

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# %name = f32[8]{0} opcode(%operand, %operand), attributes
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)")


class Array(NamedTuple):
    """The type of an array."""

    dtype: str  # XLA's name
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of one number: the first digits of its dtype. A "pred" takes a byte."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits[0]) if digits else 8

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.bits * math.prod(self.dims) // 8


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    arrays: tuple[Array, ...]  # of the result
    opcode: str
    operands: "tuple[Instruction, ...]" = dataclasses.field(repr=False)
    line: str  # from the result on

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


Computation = dict[str, Instruction]  # by name, in their order


class Executed(NamedTuple):
    """An instruction that the program executes."""

    instruction: Instruction
    runs: int  # the product of known trip counts of the loops around it
    scope: str  # names of the calls around it: inside a called function, names begin anew


class Module(NamedTuple):
    """The computations of a program by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def executed(self) -> Iterator[Executed]:
        """Each instruction in order, once for each place that calls its computation."""
        return self._executed(self.entry, 1, "")

    def _executed(self, name: str, runs: int, scope: str) -> Iterator[Executed]:
        for instruction in self.computations[name].values():
            yield Executed(instruction, runs, scope)
            inner = f"{scope}{instruction.op_name}/" if instruction.opcode == "call" else scope
            for called in instruction.called:
                yield from self._executed(called, runs * instruction.trip_count, inner)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of a fusion and of the fusions within; any other instruction itself."""
        called = instruction.find(r"calls=%([\w.\-]+)") if instruction.opcode == "fusion" else ""
        if called not in self.computations:
            yield instruction
        for inner in self.computations.get(called, {}).values():
            yield from self.inside(inner)


def parse(text: str | None) -> Module:
    """Parses the text of a compiled or lowered program.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, {}
    for line in (text or "").splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            name, result, opcode, operands = found.groups()
            arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", result)
            operands = (current.get(operand) for operand in re.findall(r"%([\w.\-]+)", operands))
            current[name] = Instruction(
                name=name,
                arrays=tuple(
                    Array(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in arrays
                ),
                opcode=opcode,
                operands=tuple(operand for operand in operands if operand is not None),
                line=line[found.start(2) :],
            )
    if entry is None:
        raise ValueError("`compiled`: expected the text of an HLO module; it has no ENTRY computation.")
    return Module(computations, entry)
