"""Batches on the devices before a step asks for them.

    batches = prefetch_to_device(Loader(...))
    for step, batch in zip(range(steps), batches):
        state = train_step(state, batch)
        checkpoint.save(folder, step, state, {"data": batches.state()})

`state()` is that after the last batch that was handed out: a resumed run sees the batch after it.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import jax


class DevicePrefetch:
    """An iterator over batches on devices; made by `prefetch_to_device`."""

    def __init__(self, iterator: Any, size: int, sharding: jax.sharding.Sharding | None) -> None:
        self._iterator, self._size, self._sharding = iterator, size, sharding
        self._ahead: deque[tuple[Any, Any]] = deque()  # batch, state of the iterator after it
        self._state = self._read_state()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch, as jax.Arrays; the copies of the `size` batches after it are under way."""
        self.read_ahead()
        if not self._ahead:
            raise StopIteration
        batch, self._state = self._ahead.popleft()
        return batch

    def read_ahead(self) -> None:
        """Reads the next batch and the `size` batches after it, without handing one out."""
        while len(self._ahead) <= self._size:
            try:
                batch = next(self._iterator)
            except StopIteration:
                break
            self._ahead.append((jax.tree.map(self._put, batch), self._read_state()))

    def close(self) -> None:
        """Drops the batches that were read ahead and closes the iterator, if it has a `close`."""
        self._ahead.clear()
        getattr(self._iterator, "close", lambda: None)()

    def state(self) -> Any:
        """The iterator's state after the last batch that was handed out.

        Raises:
            TypeError: the iterator has no `state`.
        """
        if self._state is None:
            raise TypeError(f"`iterator` is a {type(self._iterator).__name__}, which has no `state()`")
        return self._state

    def restore(self, state: Any) -> None:
        """Drops the batches that were read ahead and restores the iterator."""
        self._iterator.restore(state)
        self._ahead.clear()
        self._state = self._read_state()

    def _put(self, rows: Any) -> jax.Array:
        if self._sharding is None:
            return jax.device_put(rows)
        return jax.make_array_from_process_local_data(self._sharding, rows)

    def _read_state(self) -> Any:
        return getattr(self._iterator, "state", lambda: None)()


def prefetch_to_device(
    iterator: Iterator[Any], size: int = 2, sharding: jax.sharding.Sharding | None = None
) -> DevicePrefetch:
    """Copies batches to the devices before they are asked for.

    `jax.device_put` does not wait for the copy, so this needs no thread; the iterator, e.g. a `Loader`, reads
    ahead on the host.

    Args:
        iterator: over pytrees of NumPy arrays.
        size: batches on the device besides the one in use.
        sharding: of each array of a batch; None for the default device. Each of many processes gives its
            rows, as a `Loader` with `shard` has them.

    Returns:
        An iterator over the same batches as pytrees of jax.Array, with the `state()` and `restore(state)` of
        the iterator, if it has them.

    Raises:
        ValueError: `size` is below 0.
    """
    if size < 0:
        raise ValueError(f"`size` must be at least 0; got {size}")
    return DevicePrefetch(iterator, size, sharding)
