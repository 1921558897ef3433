"""Scaling methods: how the operands of a matmul are quantized, and the state of a layer.

`of_recipe` gives the `base.Scaling` of a recipe, from the table `SCALINGS`. `tensor` has one scale for a
tensor, `block` a scale for each block; see `fp8jax.scaling`.
"""

from fp8jax_torch.scaling.scalings import SCALINGS as SCALINGS
from fp8jax_torch.scaling.scalings import of_recipe as of_recipe
from fp8jax_torch.scaling.state import ScalingState as ScalingState
from fp8jax_torch.scaling.state import advance as advance
from fp8jax_torch.scaling.state import is_in_backward as is_in_backward
