"""Shuffled batches of an indexable source, read ahead by grain, resumable at any batch.

    loader = Loader(TokenFile("train.npy", 1024), batch=32, seed=0, workers=2)
    batch = next(loader)                     # shape=(32, 1025)
    state = loader.state()                   # JSON values
    loader.restore(state)                    # the next batch is the one after `batch`

The examples of batch number n depend only on the seed, the length of the source and the size of a batch. So
the number of batches taken is the whole state. Other workers and more or fewer processes can restore it; each
process reads its rows of every batch.
"""

import contextlib
import hashlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from typing import Any, Protocol

import jax
import numpy as np

from fp8jax.extras import need
from fp8jax.train.errors import BadInput

_HASHED = 16  # examples of a fingerprint


class Source(Protocol):
    """Examples by number: a list, an array, a `TokenFile`, a Hugging Face dataset, a grain source."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Example number `index`: an array, a number, a list of numbers, or a dict or tuple of them."""
        ...


class Loader(Iterator[Any]):
    """An iterator over batches, in an order that does not depend on workers and processes.

    An epoch has len(source) // batch batches, each example in at most one of them; the last examples of its
    order that fill no batch are left out. Worker processes start with the first batch, which takes seconds.
    The program's main module must be importable (work under `if __name__ == "__main__":`), and the source and
    the transform must pickle. Workers do not touch JAX's accelerators.

    Args:
        source: examples by number, all of the same shapes and dtypes; reading raises `BadInput` for one of
            another shape than example 0, and RuntimeError where the source raises StopIteration.
        batch: examples in a batch, over all processes.
        seed: of the order, any whole number >= 0.
        workers: processes that read. 0 reads in a thread of this process.
        prefetch: batches that the thread, or each worker, has ready. 0 reads when asked, without a thread.
        shuffle: a new order each epoch; False keeps the order of the source.
        epochs: after how many the iterator ends; None for never.
        shard: (index, count): this process is number `index` of `count` and gets rows
            [index * batch / count, (index + 1) * batch / count) of each batch.
        transform: example -> example, a pure function.

    Raises:
        ValueError: an argument is out of range, or the source has fewer examples than a batch.
        ImportError: grain is not installed.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        seed: int,
        workers: int = 0,
        prefetch: int = 2,
        shuffle: bool = True,
        epochs: int | None = None,
        shard: tuple[int, int] = (0, 1),
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        values = {"batch": batch, "seed": seed, "workers": workers, "prefetch": prefetch, "epochs": epochs}
        least = {"batch": 1, "seed": 0, "workers": 0, "prefetch": 1 if workers else 0, "epochs": 1}
        for name, value in values.items():
            if value is not None and value < least[name]:
                raise ValueError(f"`{name}` must be at least {least[name]}; got {value}")
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"`shard` must be (index, count) with 0 <= index < count; got {shard}")
        if batch % shard[1]:
            raise ValueError(f"`batch` must be a multiple of the {shard[1]} shards; got {batch}")
        examples = Examples(source, transform)
        if len(source) < batch:
            raise ValueError(f"`source` has {len(source)} examples, fewer than one `batch` of {batch}")
        if workers and isinstance(source, np.memmap):
            raise ValueError(
                "`source` is a np.memmap, which pickles as a copy: give a TokenFile, or workers=0"
            )
        self._workers, self._prefetch, self._taken = workers, prefetch, 0
        order = {"seed": int(seed), "batch": int(batch)}  # JSON holds no numbers of NumPy
        self._order = {**order, "examples": len(source), "shuffle": bool(shuffle)}
        dataset = need("grain").MapDataset.source(examples)
        if shuffle:
            # Grain adds the epoch to its seed: unhashed, seed 1 would begin with the second epoch of seed 0.
            dataset = dataset.shuffle(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        index, count = shard
        parts = dataset.batch(batch // count, drop_remainder=True)
        parts_of_an_epoch = self.batches_per_epoch * count
        self._batches = parts.slice(slice(index, parts_of_an_epoch, count)).repeat(epochs)
        self._running: list[Any] = []  # grain's iterator, from the first batch on
        # At the interpreter's end it would find grain's modules gone.
        weakref.finalize(self, _close, self._running)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in the source."""
        return self._order["examples"] // self._order["batch"]

    def __next__(self) -> Any:
        """The next batch: NumPy arrays like an example's, with a first axis of batch / count rows."""
        try:
            if self._running:
                batch = next(self._running[0])
            else:
                with _stop_signals_blocked():  # workers inherit that
                    self._running.append(self._start())
                    batch = next(self._running[0])
        except StopIteration:
            raise
        except BaseException:
            self.close()  # grain's iterator would skip the batch; a new one tries it again
            raise
        self._taken += 1
        # A worker's batch is in shared memory, which containers have little of.
        return jax.tree.map(np.array, batch) if self._workers else batch

    def state(self) -> dict[str, int | bool]:
        """The position of the iterator, in JSON values; the same in all processes."""
        return {"taken": self._taken, **self._order}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the position of a loader with the same order; workers, prefetch and shard may differ.

        Raises:
            ValueError: that loader had another order.
        """
        for name, here in self._order.items():
            if state.get(name) != here:
                raise ValueError(
                    f"`state` is of another loader: its {name} was {state.get(name)}, here it is {here}; "
                    "make the loader as it was made then"
                )
        self.close()
        self._taken = int(state["taken"])

    def close(self) -> None:
        """Ends workers and threads; the next batch starts them again."""
        _close(self._running)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _start(self) -> Any:
        """Grain's iterator over the remaining batches."""
        grain, ahead = need("grain"), 0 if self._workers else self._prefetch
        threads = grain.ReadOptions(num_threads=min(ahead, 1), prefetch_buffer_size=ahead)
        rest = self._batches.slice(slice(self._taken, None)).to_iter_dataset(threads)
        if self._workers:
            # Grain 0.2.18 reads this flag, which only programs of absl.app parse.
            need("absl.flags").FLAGS["grain_enable_multiprocess_worker_profiling"].present = True
            options = grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=self._prefetch)
            rest = rest.mp_prefetch(options, worker_init_fn=_start_worker)
        return iter(rest)


def _close(running: list[Any]) -> None:
    while running:
        running.pop().close()


class Examples:
    """A source after the transform, in arrays. Grain's own `map` would skip an example that is None.

    Errors name the source by `name`.
    """

    def __init__(self, source: Source, transform: Callable[[Any], Any] | None, name: str = "source") -> None:
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(source, Mapping):
            raise TypeError(
                f"`{name}`: expected examples by number, such as a list, an array or a TokenFile; got a "
                f"{type(source).__name__}"
            )
        self._source, self._transform, self._name = source, transform, name
        self._first: Any = None  # the structure of example 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        """Example number `index`.

        Raises:
            BadInput: it has other arrays or shapes than example 0.
        """
        if self._first is None:
            self._first = _structure(self._arrays(0))
        example = self._arrays(index)
        if _structure(example) != self._first:
            first, other = map(_shapes, (self._arrays(0), example))
            name = min((path for path, _ in first.items() ^ other.items()), default="")
            expected, got = (shapes.get(name, "no array") for shapes in (first, other))
            raise BadInput(
                f"`{self._name}`: expected {expected} at row {index}{name}, as in row 0; got {got}. Leave "
                "the row out, or make all rows alike with `transform`."
            )
        return example

    def _arrays(self, index: int) -> Any:
        try:
            example = self._source[index]
            return _as_arrays(example if self._transform is None else self._transform(example))
        except StopIteration as error:  # an iterator over batches would end by it
            raise RuntimeError(
                f"`{self._name}`: reading row {index} raised StopIteration; expected a row. Give the "
                "source the length of the rows that it has, or mend `transform`."
            ) from error

    def fingerprint(self, like: str = "") -> str:
        """A hash of the source's `fingerprint` or length, and of examples from the first to the last one.

        Args:
            like: the fingerprint to compare with, which says of how many examples it is; without that of the
                first and the last, as of runs of 0.1.0.
        """
        own = getattr(self._source, "fingerprint", None)
        digest = hashlib.sha256(str(len(self)).encode() if own is None else str(own).encode())
        given = re.match(r"(\d+) examples: ", like)
        count = int(given[1]) if given else 2 if like else _HASHED
        numbers = [i * (len(self) - 1) // (count - 1) for i in range(count)]
        for array in jax.tree.leaves([self[i] for i in numbers]):
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return f"{count} examples: {digest.hexdigest()}" if given or not like else digest.hexdigest()


def _structure(example: Any) -> Any:
    """Equal for examples that fit into one batch."""
    leaves, structure = jax.tree.flatten(example)
    return structure, [array.shape for array in leaves]


def _shapes(example: Any) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(example)
    return {jax.tree_util.keystr(path): f"shape {array.shape}" for path, array in leaves}


def _as_arrays(example: Any) -> Any:
    """An example with arrays for leaves; grain would take a list for a pytree, and stack each number."""
    if isinstance(example, dict):
        return {name: _as_arrays(part) for name, part in example.items()}
    if isinstance(example, tuple):
        parts = map(_as_arrays, example)
        return type(example)(*parts) if hasattr(example, "_fields") else tuple(parts)
    array = np.asarray(example)
    if array.dtype.hasobject:
        raise TypeError(
            "an example must be an array, a number, a list of numbers, or a dict or tuple of them; got a "
            f"{type(example).__name__}; `transform` can make one of it"
        )
    return array


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM in this thread, and in the processes that it starts for all their life.

    A terminal and a scheduler send them to the workers, too, of which a run still needs batches.
    """
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS
        yield
        return
    resource_tracker.ensure_running()  # its start unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(worker: int, workers: int) -> None:
    """Keeps a worker off the accelerators, whose memory JAX would allocate, and ends it with its parent."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_at_the_parents_sigterm, daemon=True).start()


def _end_with_parent() -> None:
    """Without this, a worker of a killed program would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end_at_the_parents_sigterm() -> None:
    """`multiprocessing` ends workers by SIGTERM. Any other SIGTERM is for the run, which needs them."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(128 + signal.SIGTERM)
