"""Memory of a step by part: what was planned, what the arrays take, what XLA compiled.

    found = footprint(variables, opt_state, batch, program.read(step), plan=lambda: trainer.plan())
    print(found.table())            # a heading, then a line for each part; found.note if there is no plan

All are bytes on one device. What lives between steps is compared part by part; of what a step computes on its
way a program has only the sum.
"""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fp8jax import targets
from fp8jax.memory import Plan, kinds_of
from fp8jax.program import Program

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Line(NamedTuple):
    """A part of the memory; None where that column does not tell it from others."""

    part: str
    planned: int | None
    arrays: int | None
    compiled: int | None


class Footprint(NamedTuple):
    """A step's memory on one device, in bytes."""

    lines: list[Line]
    note: str = ""  # why nothing is planned

    def table(self) -> list[list[str]]:
        """As text, in the unit that the largest number asks for."""
        largest = max((n for line in self.lines for n in line[1:] if n is not None), default=0)
        unit, size = next(((name, size) for name, size in _UNITS if largest >= size), ("bytes", 1))

        def text(number: int | None) -> str:
            return "" if number is None else f"{number / size:,.{0 if size == 1 else 2}f}"

        heading = [f"{unit} on one device", "planned", "arrays", "compiled"]
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


def footprint(
    variables: Any, opt_state: Any, batch: Any, program: Program, plan: Callable[[], Plan]
) -> Footprint:
    """Compares a step's memory with its plan.

    Args:
        variables, opt_state, batch: what the step takes, as arrays on the devices; of the batch shapes with
            shardings will do.
        program: the step's, compiled.
        plan: makes the plan of the same step. Where it fails, no run does: the note says why.
    """
    arrays: dict[str, int] = {"weights": 0, "moments": 0, "master": 0, "inputs": 0}
    leaves = jax.tree.leaves((variables, opt_state, batch))
    kinds = kinds_of(variables, opt_state) + ["inputs"] * len(jax.tree.leaves(batch))
    for kind, leaf in zip(kinds, leaves, strict=True):
        arrays[kind] += _on_one_device(leaf)
    planned, note = None, ""
    try:
        planned = plan()
    except Exception as error:  # whatever it is, a run that went well is not lost for it
        note = f"Nothing is planned here: {' '.join(str(error).split()) or type(error).__name__}"
    return Footprint(_lines(planned, arrays, program), note)


def target_of_device() -> str | None:
    """The target that a plan for JAX's first device names: a plan knows GPUs from others, and no more."""
    device = jax.local_devices()[0]
    named = [target.name for target in targets.TARGETS.values() if target.device == device.device_kind]
    return next(iter(named), "h100" if device.platform == "gpu" else None)


def _lines(plan: Plan | None, arrays: dict[str, int], program: Program) -> list[Line]:
    def of(name: str) -> int | None:
        return None if plan is None else getattr(plan, name)

    on_the_way = None if plan is None else plan.total - plan.kept
    return [
        Line("weights, with scales and statistics", of("weights"), arrays["weights"], None),
        Line("moments", of("moments"), arrays["moments"], None),
        Line("master weights", of("master"), arrays["master"], None),
        Line("batch and counters", of("inputs"), arrays["inputs"], None),
        Line("what a step takes: all of these", of("kept"), sum(arrays.values()), program.arguments),
        Line("gradients", of("gradients"), None, None),
        Line("activations", of("activations"), None, None),
        Line("temporaries", of("temporaries"), None, None),
        Line("what it computes on its way: these three", on_the_way, None, program.total - program.arguments),
        Line("total at the fullest moment", of("total"), None, program.total),
    ]


def _on_one_device(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and _is_on_host(sharding):
        return 0
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _is_on_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether it is in the memory of an accelerator's host; a CPU's own is all one."""
    device = next(iter(sharding.device_set))
    return device.platform != "cpu" and sharding.memory_kind not in (None, device.default_memory().kind)
