"""Flax NNX modules under a recipe."""

from fp8jax.adapters.nnx.lora import merge as merge
from fp8jax.adapters.nnx.lora import unmerge as unmerge
from fp8jax.adapters.nnx.model import dequantize as dequantize
from fp8jax.adapters.nnx.model import transform as transform
from fp8jax.adapters.nnx.module import freeze as freeze
from fp8jax.adapters.nnx.module import is_module as is_module
from fp8jax.adapters.nnx.module import recipes as recipes
from fp8jax.adapters.nnx.module import report as report
from fp8jax.adapters.nnx.variables import FP8State as FP8State
from fp8jax.adapters.nnx.variables import Frozen as Frozen
from fp8jax.adapters.nnx.variables import LossScale as LossScale
