"""What crosses the wire? Collectives for code that runs on each device (`jax.shard_map`).

`all_reduce`: the mean or sum of gradients, on all devices. `reduce_scatter`: a part of it on each.
`all_gather`: tensors of which each device has a part. `mu`: how far a scale may cut off outliers.
`Zero`: what each device keeps.
"""

from fp8jax.comm import mu as mu
from fp8jax.comm.gather import all_gather as all_gather
from fp8jax.comm.reduce import all_reduce as all_reduce
from fp8jax.comm.reduce import reduce_scatter as reduce_scatter
from fp8jax.comm.zero import Zero as Zero
