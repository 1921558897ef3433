"""FP8 collectives for use in `jax.shard_map`, and ZeRO sharding.

`all_reduce`: the mean or sum of gradients, on all devices. `reduce_scatter`: each device's shard of it.
`all_gather`: sharded tensors, whole on all devices. `auto_scaling`: automatic scaling of FP8 gradients.
`Zero`: ZeRO's sharding of a training state.
"""

from fp8jax.comm import auto_scaling as auto_scaling
from fp8jax.comm.gather import all_gather as all_gather
from fp8jax.comm.reduce import all_reduce as all_reduce
from fp8jax.comm.reduce import reduce_scatter as reduce_scatter
from fp8jax.comm.zero import Zero as Zero
