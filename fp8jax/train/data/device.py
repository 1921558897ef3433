"""Batches on the devices before a step asks for them.

batches = prefetch_to_device(Loader(...))
for step, batch in zip(range(steps), batches):
    state = train_step(state, batch)
    checkpoint.save(folder, step, state, {"data": batches.state()})
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import jax

from fp8jax.train.data.loader import Loader


class DevicePrefetch(Iterator[Any]):
    """An iterator over the batches of a loader on devices; made by `prefetch_to_device`."""

    def __init__(self, loader: Loader, size: int, sharding: jax.sharding.Sharding | None) -> None:
        self._loader, self._size, self._sharding = loader, size, sharding
        self._ahead: deque[Any] = deque()

    def __next__(self) -> Any:
        """The next batch, as jax.Arrays; the copies of the `size` batches after it are under way."""
        self.read_ahead()
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def read_ahead(self) -> None:
        """Reads the next batch and the `size` batches after it, without handing one out."""
        while len(self._ahead) <= self._size and (batch := next(self._loader, None)) is not None:
            self._ahead.append(jax.tree.map(self._put, batch))

    def close(self) -> None:
        """Drops the batches that were read ahead and closes the loader."""
        self._ahead.clear()
        self._loader.close()

    def state(self) -> dict[str, int | bool]:
        """The loader's state after the last batch that was handed out, whatever was read ahead."""
        state = self._loader.state()
        return {**state, "taken": state["taken"] - len(self._ahead)}

    def restore(self, state: dict[str, Any]) -> None:
        """Drops the batches that were read ahead and restores the loader."""
        self._loader.restore(state)
        self._ahead.clear()

    def _put(self, rows: Any) -> jax.Array:
        if self._sharding is None:
            return jax.device_put(rows)
        return jax.make_array_from_process_local_data(self._sharding, rows)


def prefetch_to_device(
    loader: Loader, size: int = 2, sharding: jax.sharding.Sharding | None = None
) -> DevicePrefetch:
    """Copies batches to the devices before they are asked for.

    `jax.device_put` does not wait for the copy, so this needs no thread; the loader reads ahead on the host.

    Args:
        loader: of batches.
        size: batches on the device besides the one in use.
        sharding: of each array of a batch; None for the default device. Each of many processes gives its
            rows, as a `Loader` with `shard` has them.

    Returns:
        An iterator over the same batches as pytrees of jax.Array, with the loader's `state()`,
        `restore(state)` and `close()`.

    Raises:
        ValueError: `size` is below 0.
    """
    if size < 0:
        raise ValueError(f"`size` must be at least 0; got {size}")
    return DevicePrefetch(loader, size, sharding)
