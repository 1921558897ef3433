"""Memory of a step by part: the bytes of its arrays, and the bytes of the compiled program.

    found = footprint(variables, opt_state, batch, program.read(step))
    print(found.table())            # a heading, then a line for each part

All are bytes on one device. The program does not tell gradients, activations and temporaries apart.
"""

import math
import os
from typing import Any, NamedTuple

import jax

from fp8jax.inspect.memory import bytes_by_kind
from fp8jax.inspect.program import Program

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Line(NamedTuple):
    """A part of the memory; None where that column does not tell it from others."""

    part: str
    arrays: int | None
    compiled: int | None


class Footprint(NamedTuple):
    """A step's memory on one device, in bytes."""

    lines: list[Line]

    def table(self) -> list[list[str]]:
        """As text, in the unit that the largest number asks for."""
        largest = max((n for line in self.lines for n in line[1:] if n is not None), default=0)
        unit, size = next(((name, size) for name, size in _UNITS if largest >= size), ("bytes", 1))

        def text(number: int | None) -> str:
            return "" if number is None else f"{number / size:,.{0 if size == 1 else 2}f}"

        heading = [f"{unit} on one device", "arrays", "compiled"]
        return [heading, *([line.part, *map(text, line[1:])] for line in self.lines)]


def check_fits(state: Any, devices: int = 1) -> None:
    """Raises ValueError if the arrays of these shapes alone need more memory than there is.

    Args:
        state: shapes and dtypes of what a step keeps.
        devices: that share it.
    """
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)) / devices
    there = _memory_of_device()
    if there is not None and needed > there:
        raise ValueError(
            f"weights and optimizer states need {needed / 1e9:,.0f} GB of each device, and there are "
            f"{there / 1e9:,.0f} GB; give a smaller model"
        )


def _memory_of_device() -> float | None:
    """Bytes; of a CPU those of the machine. None where nobody says."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return limit


def footprint(variables: Any, opt_state: Any, batch: Any, program: Program) -> Footprint:
    """The memory of a step.

    Args:
        variables, opt_state, batch: the step's arguments, as arrays on the devices; of the batch shapes with
            shardings will do.
        program: the step's, compiled.
    """
    arrays = bytes_by_kind(variables, opt_state, batch)
    return Footprint(
        [
            Line("weights, with scales and statistics", arrays["weights"], None),
            Line("moments", arrays["moments"], None),
            Line("master weights", arrays["master"], None),
            Line("batch and counters", arrays["inputs"], None),
            Line("what a step takes: all of these", sum(arrays.values()), program.arguments),
            Line("gradients, activations and temporaries", None, program.total - program.arguments),
            Line("total at the fullest moment", None, program.total),
        ]
    )
