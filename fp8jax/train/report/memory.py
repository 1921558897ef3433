"""The memory of a step by part: bytes on one device of its arrays, and of the compiled program.

found = memory_of_step(variables, opt_state, batch, program)
print(table(found))            # a heading, then a line for each part
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import PyTree

from fp8jax.inspect.memory import bytes_by_kind
from fp8jax.inspect.program import Program

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class MemoryPart(NamedTuple):
    """A part of the memory; None where the column does not tell it from other parts."""

    part: str
    arrays: int | None
    compiled: int | None


def memory_of_step(variables: PyTree, opt_state: PyTree, batch: PyTree, program: Program) -> list[MemoryPart]:
    """The memory of a compiled step with these arguments: arrays, or shapes with shardings."""
    arrays = bytes_by_kind(variables, opt_state, batch)
    return [
        MemoryPart("weights, with scales and statistics", arrays["weights"], None),
        MemoryPart("moments", arrays["moments"], None),
        MemoryPart("master weights", arrays["master"], None),
        MemoryPart("batch and counters", arrays["inputs"], None),
        MemoryPart("arguments of a step: all of these", sum(arrays.values()), program.arguments),
        MemoryPart("gradients, activations and temporaries", None, program.total - program.arguments),
        MemoryPart("peak", None, program.total),
    ]


def table(parts: Sequence[MemoryPart]) -> list[list[str]]:
    """The parts as text, in the unit of the largest number."""
    largest = max((number for part in parts for number in part[1:] if number is not None), default=0)
    unit, size = next(((name, size) for name, size in _UNITS if largest >= size), ("bytes", 1))

    def text(number: int | None) -> str:
        return "" if number is None else f"{number / size:,.{0 if size == 1 else 2}f}"

    heading = [f"{unit} on one device", "arrays", "compiled"]
    return [heading, *([part.part, *map(text, part[1:])] for part in parts)]
