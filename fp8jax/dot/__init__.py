"""FP8 `dot_general`, `einsum` and `ragged_dot` with their gradients: all three GEMMs of a layer run in FP8.

    y  = lhs . rhs       E4M3 x E4M3, fast accumulation
    dx = dy  . rhs^T     E5M2 x E4M3, precise accumulation
    dw = lhs^T . dy      E4M3 x E5M2, precise accumulation

    >>> import jax, jax.numpy as jnp
    >>> from fp8jax import Recipe
    >>> from fp8jax.dot import dot_general, init_state
    >>> recipe = Recipe.parse("te")
    >>> x, w = jnp.ones((4, 16)), jnp.ones((16, 32))
    >>> y = dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, state=init_state(recipe))
    >>> float(y[0, 0])
    16.0

The residuals for the backward are FP8. The new scaling state is the gradient with respect to `state`, because
only the backward knows the amax of `dy` ("overwrite with gradient").
"""

from fp8jax.dot.dot_general import dot_general as dot_general
from fp8jax.dot.dot_general import einsum as einsum
from fp8jax.dot.dot_general import init_state as init_state
from fp8jax.dot.dot_general import quantized_kernel as quantized_kernel
from fp8jax.dot.dot_general import save_fp8_operands as save_fp8_operands
from fp8jax.dot.dot_general import state_names as state_names
from fp8jax.dot.output import OPERANDS as OPERANDS
from fp8jax.dot.output import OUTPUT as OUTPUT
from fp8jax.dot.output import OUTPUT_CODES as OUTPUT_CODES
from fp8jax.dot.output import through_fp8 as through_fp8
from fp8jax.dot.ragged import high_precision_ragged_dot as high_precision_ragged_dot
from fp8jax.dot.ragged import init_ragged_state as init_ragged_state
from fp8jax.dot.ragged import ragged_dot as ragged_dot
from fp8jax.dot.row_tiles import ExpertSharding as ExpertSharding
from fp8jax.dot.vjp import GEMMS as GEMMS
from fp8jax.dot.weight import GradSlot as GradSlot
from fp8jax.dot.weight import Weight as Weight
from fp8jax.scaling.lost_state import with_state as with_state
