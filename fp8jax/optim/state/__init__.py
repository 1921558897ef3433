"""Optimizer states: their fields, the formats they are stored in, and their conversion to another recipe."""

from fp8jax.optim.state.states import AdamState as AdamState
from fp8jax.optim.state.states import DequantizedState as DequantizedState
from fp8jax.optim.state.states import is_adam_state as is_adam_state
from fp8jax.optim.state.states import is_masked as is_masked
from fp8jax.optim.state.states import is_ours as is_ours
from fp8jax.optim.state.states import moments as moments
from fp8jax.optim.state.states import skipped as skipped
