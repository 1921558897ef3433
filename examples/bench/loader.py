"""Tokens per second that a Loader reads, and how long a step waits for its batch.

    python examples/bench/loader.py
    python examples/bench/loader.py --tokens 1000000000 --workers 0 2 4
    python examples/bench/loader.py --json

A file of random uint16 ids, windows of 1025, batches of 32.

"alone": million tokens per second of a Loader that feeds no step, by workers, of plain windows and with a
transform of about 1 ms of Python, as long as a slow tokenizer. "waiting": a step of GEMMs, about 0.1 s of all
cores, waits for its batch of slow examples: read on request, ahead by a thread, or by a worker; and copied to
the device on request, or ahead.

The ways take turns, and each reads as many batches as it keeps ready before the clock starts; figures are
medians over the rounds. The start of workers does not count.
"""

import contextlib
import functools
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import clock
import jax
import jax.numpy as jnp
import numpy as np
import output

from fp8jax.train import Loader, TokenFile, prefetch_to_device, write_tokens

CONTEXT, BATCH, VOCABULARY = 1024, 32, 50_257
PACKAGES = ("grain", "jax", "jaxlib", "numpy")
READ = {"when asked": {"prefetch": 0}, "by a thread": {}, "by a worker": {"workers": 1}}


def slow(window: np.ndarray) -> np.ndarray:
    """The same window, after 10 passes over its pairs, as in byte-pair encoding."""
    ids, pairs = window.tolist(), {}
    for _ in range(10):
        pairs = {pair: rank for rank, pair in enumerate(zip(ids, ids[1:], strict=False))}
    return window if pairs else -window


def write_corpus(path: pathlib.Path, count: int) -> None:
    """Writes `count` random ids in parts."""
    random, part = np.random.default_rng(0), 1 << 20
    sizes = [part] * (count // part) + [count % part]
    write_tokens(path, (random.integers(VOCABULARY, size=size) for size in sizes))


def per_second(loader: Iterator[Any], ready: int, batches: int) -> float:
    """Million tokens per second."""
    for _ in range(ready):
        next(loader)
    begun = time.perf_counter()
    for _ in range(batches):
        next(loader)
    return batches * BATCH * CONTEXT / (time.perf_counter() - begun) / 1e6


def alone(source: TokenFile, workers: list[int], rounds: int, batches: int) -> output.Rows:
    """One row per number of workers."""
    titles, turns = {"M tokens/s": None, "slow transform": slow}, {}
    with contextlib.ExitStack() as opened:
        for count, title in itertools.product(workers, titles):
            loader = Loader(source, batch=BATCH, seed=0, workers=count, transform=titles[title])
            # Fast ways read more batches.
            most = batches if titles[title] else 10 * batches
            turn = functools.partial(per_second, opened.enter_context(loader), 2 * count + 4, most)
            turns[f"{count} {title}"] = turn
        rates = clock.take_turns(turns, rounds)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    return [
        {"workers": count, **{title: medians[f"{count} {title}"] for title in titles}} for count in workers
    ]


def waits(batches: Iterator[Any], step: Any, count: int) -> float:
    """Milliseconds that a step waits for its batch, the median of `count` steps."""
    waited = []
    for _ in range(count + 4):
        begun = time.perf_counter()
        batch = jax.block_until_ready(jax.tree.map(jnp.asarray, next(batches)))
        waited.append(time.perf_counter() - begun)
        step(batch).block_until_ready()
    return 1e3 * statistics.median(waited[4:])


def waiting(source: TokenFile, rounds: int, count: int, size: int) -> output.Rows:
    """One row per way of reading, with and without `prefetch_to_device`."""
    weights, turns = jnp.full((size, size), 1 / size), {}

    @jax.jit
    def step(batch: jax.Array) -> jax.Array:
        x = batch[:1, :1] * weights
        return jax.lax.fori_loop(0, 16, lambda _, x: x @ weights, x).sum()

    with contextlib.ExitStack() as opened:
        for read, options in READ.items():
            for copied in ("when asked", "ahead"):
                loader = opened.enter_context(Loader(source, batch=BATCH, seed=0, transform=slow, **options))
                batches = prefetch_to_device(loader) if copied == "ahead" else loader
                turns[f"read {read}, copied {copied}"] = functools.partial(waits, batches, step, count)
        waited = clock.take_turns(turns, rounds)
    return [{"way": way, "waits ms": statistics.median(found)} for way, found in waited.items()]


def main() -> None:
    """Measures both, prints."""
    tiny = {"tokens": 100_000, "workers": [0], "rounds": 1}
    args = output.parse(__doc__, tiny=tiny, tokens=100_000_000, workers=[0, 1, 2], rounds=5)
    batches, size = (2, 64) if args.tiny else (10, 1200)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "corpus.npy"
        write_corpus(path, args.tokens)
        source = TokenFile(path, CONTEXT, vocabulary=VOCABULARY)
        sections = {
            "alone": alone(source, args.workers, args.rounds, batches),
            "waiting": waiting(source, args.rounds, batches, size),
        }
    output.finish("loader", output.cpu_name(), sections, args, PACKAGES)


if __name__ == "__main__":
    main()
