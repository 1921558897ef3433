"""What crosses the wire? Collectives of gradients, for code that runs on each device (`jax.shard_map`).

`all_reduce`: the mean of gradients over devices.
"""

from fp8jax.comm.reduce import all_reduce as all_reduce
