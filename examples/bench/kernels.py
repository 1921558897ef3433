"""The time of each kernel of a program on a GPU, by JAX's profiler.

    kernels.add("step", runs, sections, args)

A row is a kernel: how often a run starts it, and its microseconds a run. The first rows are sums: of kernels
that multiply FP8 operands, of other GEMMs, of attention, of all others, and of the time between kernels.
"""

import argparse
import collections
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import output

RUNS = 3
MOST = 25  # kernels in a table

# How cuBLASLt, cuDNN, Triton and JAX name what they start; the first that matches counts.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "FP8 GEMMs": r"nvjet_(sm\d+_)?[qr]|(e4m3|e5m2).*gemm|gemm.*(e4m3|e5m2)|block_gemm",  # q: E4M3, r: E5M2
    "other GEMMs": r"nvjet|gemm|cutlass|xmma",
}
OTHERS, IDLE = "others", "no kernel runs"


def add(
    benchmark: str, runs: Mapping[str, Any], sections: Any, args: argparse.Namespace, skipped: Any = None
) -> None:
    """With `--profile FOLDER` finishes a benchmark again, with a table for each of its programs.

    The benchmark has left its record before: a profiler that fails loses no time that was measured.
    """
    if found := tables(runs, args):
        output.finish(benchmark, output.device(), sections | found, args, skipped=skipped)


def tables(runs: Mapping[str, Any], args: argparse.Namespace) -> dict[str, output.Rows]:
    """With `--profile FOLDER` a table for each program."""
    found = {}
    for name, run in runs.items() if args.profile else ():
        if rows := kernels_of(run, pathlib.Path(args.profile) / re.sub(r"\W+", "_", name)):
            found[f"kernels of {name}, {RUNS} runs"] = rows
    return found


def kernels_of(run: Callable[[], Any], folder: pathlib.Path) -> output.Rows:
    """The kernels of a run, the longest first; empty where the profiler saw none, as on a CPU.

    Args:
        run: starts the program, which is compiled and warm.
        folder: the profile stays there, for TensorBoard and XProf.
    """
    jax.block_until_ready(run())
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready([run() for _ in range(RUNS)][-1])
    found = [event for path in sorted(folder.rglob("*.xplane.pb")) for event in events(path)]
    return table(found) if found else []


def events(path: pathlib.Path) -> list[tuple[str, float, float]]:
    """Name, begin and nanoseconds of each kernel, from the file of a profile."""
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [
        (event.name, event.start_ns, event.duration_ns)
        for line in lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def kind(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHERS)


def table(found: list[tuple[str, float, float]]) -> output.Rows:
    """Sums by kind, then the kernels."""
    times: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for name, _, duration in found:
        for title in (f"= {kind(name)}", name):
            times[title] += duration
            counts[title] += 1
    begin, end = min(start for _, start, _ in found), max(start + length for _, start, length in found)
    times[f"= {IDLE}"] = max(end - begin - busy(found), 0.0)
    ordered = sorted(times, key=lambda title: (not title.startswith("= "), -times[title]))
    return [
        {
            "kernel": title[:100],
            "kind": "" if title.startswith("= ") else kind(title),
            "starts": counts[title] / RUNS,
            "us": times[title] / RUNS / 1e3,
        }
        for title in ordered[: MOST + len(KINDS) + 2]
    ]


def busy(found: list[tuple[str, float, float]]) -> float:
    """Nanoseconds in which at least one kernel ran."""
    total, last = 0.0, float("-inf")
    for _, start, length in sorted(found, key=lambda event: event[1]):
        total += max(start + length - max(start, last), 0.0)
        last = max(last, start + length)
    return total
