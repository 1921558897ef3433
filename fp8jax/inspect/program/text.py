"""The text of a compiled program, taken apart: computations of instructions."""

import math
import re
from typing import NamedTuple

# Opcodes that launch nothing themselves: values in place, or control flow whose bodies are counted.
_NO_KERNEL = frozenset(
    "add-dependency after-all async-start bitcast call conditional constant get-tuple-element opt-barrier "
    "parameter partition-id replica-id tuple while".split()
)

# Of dtypes by their names in XLA; others have 32.
BITS = {"f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16, "f16": 16, "u16": 16, "s16": 16, "f64": 64, "s64": 64}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # as printed: "bf16[8,16]{1,0}", or a tuple of such
    opcode: str
    operands: tuple[str, ...]
    line: str


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of the text by name, and the entry's name."""
    computations: dict[str, list[Instruction]] = {}
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


def _instruction(name: str, rest: str) -> Instruction:
    """`bf16[8]{0} add(%a, %b), metadata=...` in its parts."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[end + 1 :].partition("(")
    start = end + 1 + len(opcode)
    operands = re.findall(r"%([\w.\-]+)", rest[start : _closing(rest, start)])
    return Instruction(name, rest[:end], opcode.strip(), tuple(operands), rest)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def bytes_of(shape: str) -> int:
    """Size of a shape as printed, all elements of a tuple together."""
    return sum(
        max(BITS.get(dtype, 8 if dtype in ("u8", "s8", "pred") else 32) // 8, 1)
        * math.prod(map(int, filter(None, dims.split(","))))
        for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    )


def launches(instruction: Instruction) -> bool:
    """Whether it is a kernel, a library call, a copy or a collective."""
    opcode = instruction.opcode
    # The start of an asynchronous pair is the launch, its end a wait.
    return opcode not in _NO_KERNEL and not opcode.endswith(("-done", "-update"))


def executed(instruction: Instruction) -> list[str]:
    """Computations that the instruction runs as programs of their own (a fusion's is one kernel)."""
    if instruction.opcode not in ("while", "call", "conditional", "async-start"):
        return []
    names = re.findall(r"(?:condition|body|to_apply|calls|\w+_computation)=%([\w.\-]+)", instruction.line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.line)
    return names + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])


def trip_count(instruction: Instruction) -> int:
    """How often a loop runs; 1 where that is not known, and for what is no loop."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.line)
    return int(found[1]) if found and instruction.opcode == "while" else 1


def op_name(instruction: Instruction) -> str:
    """Where it was traced, e.g. "jit(step)/jvp(Dense_0)/dot_general"; "" if it does not say."""
    found = re.search(r'op_name="([^"]*)"', instruction.line)
    return found[1] if found else ""


def dtype_of(shape: str) -> str:
    """The dtype of a shape as printed; of a tuple, that of its first element (the rest is workspace)."""
    found = re.search(r"([a-z]\w*)\[", shape)
    return found[1] if found else ""


def dims_of(shape: str) -> tuple[int, ...]:
    """The dimensions of a shape as printed; of a tuple, those of its first element."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return tuple(int(dim) for dim in found[1].split(",") if dim) if found else ()
