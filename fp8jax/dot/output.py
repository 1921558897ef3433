"""Outputs of dots as FP8, so that remat can save one byte for each of their entries."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fp8jax.formats import E4M3
from fp8jax.quantization import amax, cast, expand, scale_of, to_bytes

# The `checkpoint_name` of the outputs of a transformed model's dots.
OUTPUT = "fp8jax_dot_output"
# The `checkpoint_name` of the FP8 operands that are residuals of dots.
OPERANDS = "fp8_operands"
# The `checkpoint_name` of the codes and scales of `through_fp8`.
OUTPUT_CODES = "fp8jax_output_codes"

GROUP = 128  # entries of a row that share a scale


@jax.custom_vjp
def through_fp8(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` rounded to E4M3, with a power-of-two scale for each 128 entries of a row; x's shape and dtype.

    The gradient passes straight through. The codes and the scales' exponents have the `checkpoint_name`
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
    columns = x.shape[-1]
    groups = columns // GROUP if columns % GROUP == 0 else 1
    blocks = (*x.shape[:-1], groups)
    x32 = x.astype(jnp.float32)
    largest = amax(x32, blocks)
    exponents = lax.bitcast_convert_type(
        scale_of(largest, E4M3.max, power_of_two=True), jnp.uint32
    ) >> np.uint32(23)
    exponents = jnp.where(largest < jnp.inf, exponents, 255).astype(jnp.uint8)
    codes = to_bytes(cast(x32 / _scale(exponents, x.shape), E4M3))
    codes, exponents = checkpoint_name((codes, exponents), OUTPUT_CODES)
    numbers = lax.bitcast_convert_type(codes, E4M3.dtype).astype(jnp.float32)
    return (numbers * _scale(exponents, x.shape)).astype(x.dtype)


def _scale(exponents: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The power of two of each entry's group, float32; infinite for the exponent 255."""
    bits = exponents.astype(jnp.uint32) << np.uint32(23)
    return expand(lax.bitcast_convert_type(bits, jnp.float32), shape)


through_fp8.defvjp(lambda x: (_rounded(x), None), lambda _, grad: (grad,))
