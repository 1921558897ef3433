"""One step of Adam or Muon: arithmetic, formats of moments, the fused update, and the update of shards.

`Recipe.rounding=stochastic+kahan+root` keeps the recipe `fp8` from losing to rounding; each part has a file:

- First moments are rounded stochastically, because an 8-bit moment that is rounded to nearest stops decaying
  before it is zero: `fp8jax/quantization/rounding.py`.
- The rounding error of a weight is stored in one byte (kahan) and added at the next step, because a 16-bit
  weight ignores updates below half of its last bit: `fp8jax/optim/step/weight_rounding.py`.
- Second moments are stored as their roots, because the squares of small gradients are 0 in FP16, and their
  updates then too large: `fp8jax/optim/storage/square_root.py`.
"""

from fp8jax.optim.step.arithmetic import DECOUPLED as DECOUPLED
from fp8jax.optim.step.arithmetic import L2 as L2
from fp8jax.optim.step.arithmetic import NO_DECAY as NO_DECAY
from fp8jax.optim.step.arithmetic import AdamScalars as AdamScalars
from fp8jax.optim.step.arithmetic import MuonScalars as MuonScalars
from fp8jax.optim.step.arithmetic import ParamState as ParamState
from fp8jax.optim.step.arithmetic import as_directions as as_directions
from fp8jax.optim.step.arithmetic import directions as directions
from fp8jax.optim.step.arithmetic import largest_update as largest_update
from fp8jax.optim.step.arithmetic import nesterov_shares as nesterov_shares
from fp8jax.optim.step.encode_state import Rounding as Rounding
from fp8jax.optim.step.encode_state import Written as Written
from fp8jax.optim.step.encode_state import as_written as as_written
from fp8jax.optim.step.fused import fused_adam as fused_adam
from fp8jax.optim.step.sharded import advance_over_devices as advance_over_devices
