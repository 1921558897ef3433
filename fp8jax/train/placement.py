"""Where the arrays of a data-parallel step are: the state as ZeRO has it, a batch cut in rows.

    place = over(processes.devices(0), rows=config.batch)
    zero = place.zero(recipe, config)          # for the gradient and the optimizer
    loss = step(state, place.feed(batch))

A step then means the same on any number of devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8jax.comm import Zero
from fp8jax.recipe import Recipe
from fp8jax.train.launch import Launch


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

    def zero(self, recipe: Recipe, launch: Launch) -> Zero | None:
        """What each device keeps; None for all on a single one."""
        if self.mesh.size == 1 and launch.zero:
            raise ValueError(
                f"--zero {launch.zero} shares among devices, and there is one: add --devices or --distributed"
            )
        if self.mesh.size == 1 and not launch.offload:
            return None
        return Zero(self.mesh, recipe, launch.zero, offload=launch.offload)

    def one_at_a_time(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A program as it is to be called over and over: where a CPU is taken for several devices, not before
        its last call has ended, for whose collectives the next one would take the threads."""
        local = self.mesh.local_devices
        if len(local) == 1 or local[0].platform != "cpu":
            return compiled
        return lambda *args: jax.block_until_ready(compiled(*args))

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
