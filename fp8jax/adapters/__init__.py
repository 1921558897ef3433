"""Adapters: how Flax Linen, Flax NNX and plain functions get FP8.

- `linen`: what Linen calls parameters, methods and collections.
- `nnx`: the same for NNX modules.
- `moe`: mixture-of-experts layers for both.
"""

from fp8jax.adapters import linen as linen
from fp8jax.adapters import moe as moe
from fp8jax.adapters import nnx as nnx
from fp8jax.adapters.gradients import accumulate_gradients as accumulate_gradients
from fp8jax.adapters.gradients import value_and_grad as value_and_grad
from fp8jax.adapters.transform import report as report
from fp8jax.adapters.transform import transform as transform
