"""Agreement between the processes that train one model, over `torch.distributed`."""

from typing import Any

import torch
from jaxtyping import Float
from torch import distributed


def are_several(group: Any = None) -> bool:
    """Whether the group, by default of all processes, has more than one process."""
    is_initialized = distributed.is_available() and distributed.is_initialized()
    return is_initialized and distributed.get_world_size(group) > 1


def largest_of_all(x: Float[torch.Tensor, "..."], group: Any = None) -> Float[torch.Tensor, "..."]:
    """The largest of the processes' numbers, for each entry of `x`. Each process must call this."""
    if are_several(group):
        distributed.all_reduce(x, distributed.ReduceOp.MAX, group)
    return x
