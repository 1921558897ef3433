"""The largest batch that fits into the memory, found without running out of it.

    found = largest_batch(lambda rows: peak_of(rows), budget=80e9)
    found.rows, found.bytes          # this batch fits,
    found.next_bytes                 # and one with a row more does not

Programs are compiled and not run: the compiler says how much memory each needs. So the search works for a GPU
that is not here, too.
"""

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from fp8jax.inspect import targets

MOST = 2**20  # rows that the search tries


class BatchSize(NamedTuple):
    """A batch size and the programs that were compiled to find it."""

    rows: int
    bytes: int
    next_bytes: int | None  # with a row more; None if `MOST` ended the search
    compiled: dict[int, int]  # rows -> bytes


def largest_batch(bytes_of: Callable[[int], int], budget: float) -> BatchSize:
    """The largest number of rows for which a program needs at most `budget` bytes.

    Memory grows almost linearly with rows. So each guess lies on the line through the two nearest known
    sizes, and five to eight programs are compiled.

    Args:
        bytes_of: peak memory of the program for so many rows, in bytes.
        budget: bytes.

    Raises:
        ValueError: one row does not fit.
    """
    known: dict[int, int] = {}

    def fits(rows: int) -> bool:
        if rows not in known:
            known[rows] = bytes_of(rows)
        return known[rows] <= budget

    if not fits(1):
        raise ValueError(
            f"one row needs {known[1] / 1e9:.3g} GB, and the budget is {budget / 1e9:.3g} GB. Use gradient "
            "checkpointing, a level with smaller states, ZeRO, or a smaller model."
        )
    low, high = 1, 2
    while high <= MOST and fits(high):
        low, high = high, min(_guess(known, low // 2 or 1, high, budget, 2 * high, 8 * high), MOST + 1)
    while high - low > 1:
        guess = _guess(known, low, high, budget, low + 1, high - 1) if high in known else (low + high) // 2
        low, high = (guess, high) if fits(guess) else (low, guess)
    return BatchSize(low, known[low], known.get(high), known)


def _guess(known: dict[int, int], low: int, high: int, budget: float, least: int, most: int) -> int:
    """The rows at which the line through two known sizes meets the budget."""
    low = max(rows for rows in known if rows <= low)
    slope = (known[high] - known[low]) / (high - low)
    guess = low + (budget - known[low]) / slope if slope > 0 else most
    return int(min(max(guess, least), most))


def budget_of_device(target: str = "") -> float:
    """Bytes that XLA may allocate of a device's memory: by default three quarters of it.

    Args:
        target: a GPU that is not here; by default JAX's first device.

    Raises:
        ValueError: the device does not report its memory, as CPUs do not.
    """
    if target:
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        fraction = next((float(os.environ[name]) for name in names if os.environ.get(name)), 0.75)
        return fraction * targets.get(target).memory
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(f"{device} does not report its memory: give --memory-budget in GB, or --target")
    return limit


def check_fits(state: PyTree, devices: int) -> None:
    """Raises ValueError if a state alone needs more memory than the devices have that share it.

    Args:
        state: shapes and dtypes.
        devices: number of devices that share it. A CPU has the memory of the machine.
    """
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)) / devices
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is not None and needed > limit:
        raise ValueError(
            f"weights and optimizer states need {needed / 1e9:,.0f} GB of each device, and there are "
            f"{limit / 1e9:,.0f} GB; use a smaller model"
        )
