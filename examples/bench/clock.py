"""Times of ways that take turns.

    times = take_turns({name: timer(run) for name, run in ways.items()}, rounds=30)
    row(times, "fp8jax te"), ratio(times, "bf16", "fp8jax te")

A machine slows down when it gets hot, and two runs of a program differ. So each way has a turn in every
round, each round begins with another way, and a ratio is the median over the rounds of the ratios within a
round.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Times = dict[str, list[float]]

LEAST_S = 0.05  # of a turn, so that the clock and the first launch do not count
# The same for runs whose results are new arrays. On an H200 the first of a turn, with gigabytes of them, was
# 4 to 7 ms late.
LEAST_S_OF_NEW = 0.4


def timer(
    run: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready, least_s: float = LEAST_S
) -> Callable[[], float]:
    """A turn of several runs and one wait, in seconds a run, after two runs to warm up."""
    wait(run())
    begun = time.perf_counter()
    wait(run())
    calls = max(1, min(64, round(least_s / (time.perf_counter() - begun))))

    def turn() -> float:
        begun = time.perf_counter()
        for _ in range(calls - 1):
            run()
        wait(run())
        return (time.perf_counter() - begun) / calls

    return turn


def take_turns(timers: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Seconds of each in so many rounds."""
    times: Times = {name: [] for name in timers}
    names = list(timers)
    for number in range(rounds):
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
    """The median over the rounds of one way's time over another's; None where one was not timed."""
    if one not in times or other not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
