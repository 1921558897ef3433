"""Where the arrays of a data-parallel step are: the state whole on every device, a batch cut in rows.

    place = over(processes.devices(), rows=config.batch)
    state = jax.jit(first_state, out_shardings=place.everywhere)(...)
    state = jax.jit(step, out_shardings=place.everywhere)(state, place.feed(batch))

A step then means the same on any number of devices: XLA adds what the devices have.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Placement(NamedTuple):
    """A mesh with the one axis "data"."""

    mesh: Mesh

    @property
    def everywhere(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """As many rows on every device."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def feed(self, batch: np.ndarray) -> jax.Array:
        """The batch on the devices; each process, which has all of it, gives its own devices theirs."""
        return jax.make_array_from_callback(batch.shape, self.rows, lambda index: batch[index])


def over(devices: Sequence[Any], rows: int) -> Placement:
    """A placement on these devices; raises ValueError if they cannot share the rows of a batch."""
    if rows % len(devices):
        raise ValueError(
            f"--batch must be a multiple of the devices, so that each gets as much; got --batch {rows} for "
            f"{len(devices)} devices"
        )
    return Placement(Mesh(np.array(devices), ("data",)))
