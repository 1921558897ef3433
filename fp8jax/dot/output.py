"""Outputs of dots as FP8, so that remat can save one byte for each of their entries."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fp8jax.formats import E4M3, E8M0
from fp8jax.quantization import BlockMethod, ScaledArray, as_bytes, as_codes, quantize_in

# The `checkpoint_name` of the outputs of a transformed model's dots.
OUTPUT = "fp8jax_dot_output"
# The `checkpoint_name` of the FP8 operands that are residuals of dots.
OPERANDS = "fp8_operands"
# The `checkpoint_name` of the codes and scales of `through_fp8`.
OUTPUT_CODES = "fp8jax_output_codes"

GROUP = 128  # entries of a row that share a scale


@jax.custom_vjp
def through_fp8(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` rounded to E4M3, with an E8M0 scale for each 128 entries of a row; x's shape and dtype.

    The gradient passes straight through. The codes and scales have the `checkpoint_name`
    `OUTPUT_CODES`. A policy that saves this name saves one byte for each entry, and what is computed from x
    is recomputed from its rounded value, which the forward also uses.

    Rows whose length is not a multiple of 128 have one scale. Rounds to nearest even; zero stays zero. An
    infinite entry or NaN makes its 128 entries infinite or NaN.

    References:
        COAT, arXiv 2410.19313, section 5 (FP8 activations in groups).
    """
    return _rounded(x)


def _rounded(x: jax.Array) -> jax.Array:
    if not x.ndim:
        return x
    groups = x.shape[-1] // GROUP if x.shape[-1] % GROUP == 0 else 1
    q = quantize_in(x, (*x.shape[:-1], groups), BlockMethod(E4M3, ()))
    exponents = lax.bitcast_convert_type(q.scale, jnp.uint32) >> np.uint32(23)
    scale = lax.bitcast_convert_type(exponents.astype(jnp.uint8), E8M0.dtype)
    saved = checkpoint_name(as_bytes(ScaledArray(q.data, scale)), OUTPUT_CODES)
    return as_codes(saved, E4M3).dequantize(x.dtype)


through_fp8.defvjp(lambda x: (_rounded(x), None), lambda _, grad: (grad,))
