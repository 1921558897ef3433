"""Scaling: the state of a layer, and how its operands are quantized; see `fp8jax.scaling`."""

from fp8jax_torch.scaling.state import ScalingState as ScalingState
from fp8jax_torch.scaling.state import advance as advance
