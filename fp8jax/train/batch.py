"""The largest batch that fits, found without ever running out of memory.

    found = largest_batch(lambda rows: peak_of(rows), budget=80e9)
    found.rows, found.bytes          # this fits,
    found.next_bytes                 # and with one row more it would not

Programs are compiled, not run: XLA says what each needs. So it works as well for a GPU that is not here.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import jax

from fp8jax.inspect import targets

MOST = 2**20


class Found(NamedTuple):
    """A batch size and what was compiled to find it."""

    rows: int
    bytes: int
    next_bytes: int | None  # with a row more; None where `most` ended the search
    compiled: dict[int, int]  # rows -> bytes


def largest_batch(bytes_of: Callable[[int], int], budget: float, *, most: int = MOST) -> Found:
    """The largest number of rows whose program needs at most `budget` bytes.

    Memory grows almost linearly with rows, so each guess is on the line through the two nearest sizes
    known: five to eight programs are compiled.

    Args:
        bytes_of: bytes that a program for so many rows needs at its peak.
        budget: bytes.
        most: rows that are enough.

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
    while high <= most and fits(high):
        low, high = high, min(_guess(known, low // 2 or 1, high, budget, 2 * high, 8 * high), most + 1)
    while high - low > 1:
        guess = _guess(known, low, high, budget, low + 1, high - 1) if high in known else (low + high) // 2
        low, high = (guess, high) if fits(guess) else (low, guess)
    return Found(low, known[low], known.get(high), known)


def _guess(known: dict[int, int], low: int, high: int, budget: float, least: int, most: int) -> int:
    """Where the line through two sizes, or the nearest known ones below them, meets the budget."""
    low = max(rows for rows in known if rows <= low)
    each = (known[high] - known[low]) / (high - low)
    guess = low + (budget - known[low]) / each if each > 0 else most
    return int(min(max(guess, least), most))


def budget_of_device(target: str = "") -> float:
    """Bytes that XLA takes of a device's memory: three quarters of it, or `XLA_CLIENT_MEM_FRACTION`.

    Args:
        target: a GPU that is not here; by default JAX's first device.

    Raises:
        ValueError: the device does not say how much memory it has, as CPUs do not.
    """
    if target:
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        fraction = next((float(os.environ[name]) for name in names if os.environ.get(name)), 0.75)
        return fraction * targets.get(target).memory
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"{device} does not say how much memory it has: give --memory-budget in GB, or --target"
        )
    return stats["bytes_limit"]
