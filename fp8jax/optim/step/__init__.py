"""One step of Adam or Muon: arithmetic, formats of moments, the fused update, and the update of shards."""

from fp8jax.optim.step.arithmetic import DECOUPLED as DECOUPLED
from fp8jax.optim.step.arithmetic import L2 as L2
from fp8jax.optim.step.arithmetic import NO_DECAY as NO_DECAY
from fp8jax.optim.step.arithmetic import AdamScalars as AdamScalars
from fp8jax.optim.step.arithmetic import MuonScalars as MuonScalars
from fp8jax.optim.step.arithmetic import ParamState as ParamState
from fp8jax.optim.step.arithmetic import largest_update as largest_update
from fp8jax.optim.step.arithmetic import nesterov_shares as nesterov_shares
from fp8jax.optim.step.encode_state import Rounding as Rounding
from fp8jax.optim.step.encode_state import Written as Written
from fp8jax.optim.step.encode_state import as_written as as_written
from fp8jax.optim.step.fused import fused_adam as fused_adam
from fp8jax.optim.step.orthogonal import as_directions as as_directions
from fp8jax.optim.step.orthogonal import directions as directions
from fp8jax.optim.step.sharded import advance_over_devices as advance_over_devices
