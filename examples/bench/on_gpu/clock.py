"""Times of things that take turns, and programs compiled side by side.

    timers = {name: timer(run) for name, run in ways.items()}
    times = take_turns(timers, until, most=30)
    row(times, "fp8jax te"), ratio(times, "bf16", "fp8jax te")

A GPU slows down when it gets hot, and two runs of a program differ: so every way has a turn in every round,
each round begins with another way, and a ratio is the median over the rounds of the ratios within a round.
"""

import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from on_gpu.notes import Notes

Times = dict[str, list[float]]

LEAST_ROUNDS = 3
LEAST_S = 0.05  # of a turn: the clock and the first launch are nothing against it


def timer(run: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> Callable[[], float]:
    """Runs twice to warm up, and returns a turn: several runs, then one wait; gives seconds a run."""
    wait(run())
    begun = time.perf_counter()
    wait(run())
    once = time.perf_counter() - begun
    calls = max(1, min(64, round(LEAST_S / once)))

    def turn() -> float:
        begun = time.perf_counter()
        for _ in range(calls - 1):
            run()
        out = run()
        wait(out)
        return (time.perf_counter() - begun) / calls

    return turn


def take_turns(timers: Mapping[str, Callable[[], float]], until: float, most: int) -> Times:
    """Seconds of each, round after round, until it is late."""
    times: Times = {name: [] for name in timers}
    names = list(timers)
    for number in range(most):
        if number >= min(LEAST_ROUNDS, most) and time.time() > until:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(timers[name]())
    return times


def row(times: Times, name: str) -> dict[str, Any]:
    """Median and quartiles in milliseconds."""
    low, middle, high = quartiles(times[name])
    return {"ms": 1e3 * middle, "lower": 1e3 * low, "upper": 1e3 * high, "rounds": len(times[name])}


def quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(seconds) < 2:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def ratio(times: Times, one: str, other: str) -> float | None:
    """One's time over the other's: the median over the rounds."""
    if one not in times or other not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def compile_all(compiles: Mapping[Any, Callable[[], Any]], notes: Notes) -> dict[Any, Any]:
    """What the functions compile, side by side; one that fails is noted and left out."""
    done = {}
    with concurrent.futures.ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 1) // 2))) as pool:
        futures = {name: pool.submit(compile_one) for name, compile_one in compiles.items()}
    for name, future in futures.items():
        with notes.attempt(f"compiling {name if isinstance(name, str) else ' '.join(name)}"):
            done[name] = future.result()
    return done
