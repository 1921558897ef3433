"""Scaling methods: how the operands of a dot are quantized.

`of_recipe` gives the `base.Scaling` of a recipe, from the table `SCALINGS`. `tensor` has one scale for a
tensor, from the amaxes of previous steps (`delayed`) or from the tensor itself (`current`); `block` has a
scale for each block of a tensor, and `nvfp4` also one for the tensor. `merge` combines the scaling states of
several uses of a layer.
"""

from fp8jax.scaling.base import CASTS as CASTS
from fp8jax.scaling.base import GRAD as GRAD
from fp8jax.scaling.base import LHS as LHS
from fp8jax.scaling.base import OPERANDS as OPERANDS
from fp8jax.scaling.base import RHS as RHS
from fp8jax.scaling.base import Scaling as Scaling
from fp8jax.scaling.base import State as State
from fp8jax.scaling.block import BlockScaling as BlockScaling
from fp8jax.scaling.scalings import SCALINGS as SCALINGS
from fp8jax.scaling.scalings import of_recipe as of_recipe
from fp8jax.scaling.scalings import with_fresh_scales as with_fresh_scales
