"""Flax Linen modules under a recipe."""

from fp8jax.adapters.linen.lora import LoRAModel as LoRAModel
from fp8jax.adapters.linen.model import LinenModel as LinenModel
from fp8jax.adapters.linen.model import is_module as is_module
from fp8jax.adapters.linen.train_state import TrainState as TrainState
