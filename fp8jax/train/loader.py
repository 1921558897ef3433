"""Batches of anything that can be indexed, shuffled anew each epoch, read ahead, resumable anywhere.

    loader = Loader(TokenFile("train.npy", 1024), batch=32, seed=0, workers=2)
    batch = next(loader)                     # shape=(32, 1025)
    checkpoint.save(folder, step, state, history, data=loader.state())
    loader.restore(found.data)               # the next batch is the one that would have come

Which examples batch number n has depends on the seed, the length of the source and the size of a batch, and
on nothing else. So the number of batches taken is all the state there is: it can be restored with other
workers, and by more or fewer processes, each of which reads its rows of every batch. Grain (the extra
`train`) shuffles, batches and reads.
"""

import hashlib
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from fp8jax.train.extras import need


class Source(Protocol):
    """Examples by number: a list, an array, a `TokenFile`, a Hugging Face dataset, a grain source."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Number `index`: an array, a number, a list (taken for an array), or a dict or tuple of them."""
        ...


class Loader:
    """An iterator over batches, in an order that neither workers nor processes change.

    Every epoch has `batches_per_epoch` batches, each example in at most one of them; the last
    len(source) % batch of the epoch's order are left out.

    Worker processes are started with the first batch (seconds each), and need a program whose main module can
    be imported: under `if __name__ == "__main__":`. They are told to keep off JAX's accelerators. The source
    and the transform are pickled once for each.

    Args:
        source: examples by number. All must have the same shapes and dtypes.
        batch: examples in a batch, over all processes.
        seed: of the order, any whole number >= 0.
        workers: processes that read. 0 reads in a thread of this one.
        prefetch: batches that the thread, or each worker, has ready. 0 reads when asked, without a thread.
        shuffle: a new order each epoch; False is the source's own.
        epochs: after how many the iterator ends; None for never.
        shard: (index, count): this process is number `index` of `count` and gets rows
            [index * batch / count, (index + 1) * batch / count) of each batch.
        transform: example -> example. It has to be a pure function for the order and the state to mean
            anything.

    Raises:
        ValueError: an argument out of range, or fewer examples than one batch has.
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
        _check_numbers(batch, seed, workers, prefetch, epochs, shard)
        if len(source) < batch:
            raise ValueError(f"`source` has {len(source)} examples, fewer than one `batch` of {batch}")
        if workers and isinstance(source, np.memmap):
            raise ValueError(
                "`source` is a np.memmap, which pickles as a copy: give a TokenFile, or workers=0"
            )
        self._workers, self._prefetch = workers, prefetch
        self._about = {"seed": seed, "batch": batch, "examples": len(source), "shuffle": bool(shuffle)}
        self._batches = _in_order(source, self._about, epochs, shard, transform)
        self._taken = 0
        self._running: list[Any] = []  # grain's iterator, from the first batch on
        # Left to the interpreter's end, it would find grain's modules gone.
        weakref.finalize(self, _close, self._running)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches that the source makes."""
        return self._about["examples"] // self._about["batch"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch: what an example is, with a first axis of batch / count, in NumPy arrays."""
        if not self._running:
            self._running.append(self._start())
        try:
            batch = next(self._running[0])
        except StopIteration:
            raise
        except BaseException:
            self.close()  # grain's iterator would go on behind the batch, or end; a new one tries it again
            raise
        self._taken += 1
        # Of a worker it is in shared memory, which is scarce in containers and has to be given back in time.
        return jax.tree.map(np.array, batch) if self._workers else batch

    def state(self) -> dict[str, int | bool]:
        """Where the iterator stands, as JSON can hold it; the same in all processes."""
        return {"taken": self._taken, **self._about}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes where a loader of the same order stood; workers, prefetch and shard may be others.

        Args:
            state: what `state` gave.

        Raises:
            ValueError: that loader's order was another one.
        """
        for name, here in self._about.items():
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
        """Grain's iterator over the batches that are left."""
        grain = need("grain")
        in_threads = 0 if self._workers else self._prefetch
        threads = grain.ReadOptions(num_threads=min(in_threads, 1), prefetch_buffer_size=in_threads)
        left = self._batches.slice(slice(self._taken, None)).to_iter_dataset(threads)
        if self._workers:
            # Grain 0.2.18 reads this flag, which nobody has parsed but in programs of absl.app.
            need("absl.flags").FLAGS["grain_enable_multiprocess_worker_profiling"].present = True
            options = grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=self._prefetch)
            left = left.mp_prefetch(options, worker_init_fn=_begin_work)
        return iter(left)


def _close(running: list[Any]) -> None:
    while running:
        running.pop().close()


def _in_order(
    source: Source,
    about: dict[str, Any],
    epochs: int | None,
    shard: tuple[int, int],
    transform: Callable[[Any], Any] | None,
) -> Any:
    """This process's part of each batch of all epochs, by number."""
    index, count = shard
    examples = need("grain").MapDataset.source(Examples(source, transform))
    if about["shuffle"]:
        # Grain adds the epoch to its seed. Hashed first, two runs' seeds are not each other's next epoch.
        seed = int(np.random.SeedSequence(about["seed"]).generate_state(1)[0])
        examples = examples.shuffle(seed)
    whole = about["examples"] // about["batch"] * count  # parts of batches in an epoch
    parts = examples.batch(about["batch"] // count, drop_remainder=True)
    return parts.slice(slice(index, whole, count)).repeat(epochs)


class Examples:
    """A source after the transform, in arrays. Grain's own `map` would let None pass, and skip it later."""

    def __init__(self, source: Source, transform: Callable[[Any], Any] | None) -> None:
        self._source, self._transform = source, transform

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        example = self._source[index]
        return _as_arrays(example if self._transform is None else self._transform(example))

    def fingerprint(self) -> str:
        """Of how many there are, and of the first and the last: all that can be read soon."""
        digest = hashlib.sha256(str(len(self)).encode())
        for array in jax.tree.leaves([self[0], self[len(self) - 1]]):
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return digest.hexdigest()


def _as_arrays(example: Any) -> Any:
    """An example with arrays for leaves; grain would take a list for a tree of numbers, and stack each."""
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


def _begin_work(worker: int, workers: int) -> None:
    """The first thing that a worker process does."""
    # JAX's first look at its devices would take most of a GPU's memory.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker of a program that was killed would wait for ever for somebody to take its batches."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _check_numbers(
    batch: int, seed: int, workers: int, prefetch: int, epochs: int | None, shard: tuple[int, int]
) -> None:
    index, count = shard
    for name, value, least in (
        ("batch", batch, 1),
        ("seed", seed, 0),
        ("workers", workers, 0),
        ("prefetch", prefetch, 1 if workers else 0),
        ("epochs", 1 if epochs is None else epochs, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}; got {value}")
    if not 0 <= index < count:
        raise ValueError(f"`shard` must be (index, count) with 0 <= index < count; got {shard}")
    if batch % count:
        raise ValueError(f"`batch` must be a multiple of the {count} shards; got {batch}")
