"""The placement of a data-parallel step: a mesh, the sharding of a batch, and ZeRO's sharding of the state.

placement = place(distributed.devices(0))
zero = placement.zero(config)          # for the gradient and the optimizer
loss = step(state, placement.put(batch))
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8jax.comm import Zero
from fp8jax.train.config import DeviceConfig


class Placement(NamedTuple):
    """A mesh with one axis, "data"."""

    mesh: Mesh
    replicated: NamedSharding  # the whole array on every device
    by_rows: NamedSharding  # the same number of rows on every device

    def zero(self, config: DeviceConfig) -> Zero | None:
        """The sharding of the state; None on a single device without offload."""
        if self.mesh.size == 1 and config.zero:
            raise ValueError(
                f"--zero {config.zero} shares among devices, and there is one: add --devices or --distributed"
            )
        if self.mesh.size == 1 and not config.offload:
            return None
        return Zero(self.mesh, stage=config.zero, offload=config.offload)

    def one_at_a_time(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The program, made to wait for its result where one CPU stands for several devices.

        Without the wait, the next call can take the threads that the collectives of the last one need.
        """
        local = self.mesh.local_devices
        if len(local) == 1 or local[0].platform != "cpu":
            return compiled
        return lambda *args: jax.block_until_ready(compiled(*args))

    def put(self, batch: Any) -> jax.Array:
        """An array on the devices. Each process has all of it and gives its devices their rows."""
        array = np.asarray(batch)
        return jax.make_array_from_callback(array.shape, self.by_rows, lambda index: array[index])


def place(devices: Sequence[Any]) -> Placement:
    """A placement on these devices."""
    mesh = Mesh(np.array(devices), ("data",))
    return Placement(mesh, NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")))
