"""Quantized arrays: low-precision codes and a scale, `value = data * scale`.

    >>> import jax.numpy as jnp
    >>> from fp8jax import formats, quantize
    >>> q = quantize(jnp.array([0.1, -2.0, 300.0]), formats.E4M3)
    >>> q.data.dtype, q.scale.shape
    (dtype(float8_e4m3fn), ())
    >>> [round(float(v), 3) for v in q.dequantize()]
    [0.105, -2.009, 300.0]

All casts to low-precision formats are in this package. A cast

* rounds to nearest, ties to even, and keeps subnormals;
* saturates: magnitudes above the format's max, and infinities, become the max, as in the hardware's
  saturating conversion;
* keeps NaN;
* keeps zero with its sign.

A scale is finite and positive. The scale and its reciprocal are normal float32 numbers. An amax that is zero,
subnormal, infinite or NaN gives scale 1. `quantize_blocks` says what scales of small blocks are.
"""

from fp8jax.quantization.array import ScaledArray as ScaledArray
from fp8jax.quantization.array import as_bytes as as_bytes
from fp8jax.quantization.array import as_codes as as_codes
from fp8jax.quantization.array import checked_parameter as checked_parameter
from fp8jax.quantization.array import expand as expand
from fp8jax.quantization.array import format_of as format_of
from fp8jax.quantization.array import is_scaled as is_scaled
from fp8jax.quantization.array import on_data as on_data
from fp8jax.quantization.array import own_value as own_value
from fp8jax.quantization.array import value as value
from fp8jax.quantization.array import with_float32_scales as with_float32_scales
from fp8jax.quantization.blocks import BLOCK_1X128 as BLOCK_1X128
from fp8jax.quantization.blocks import BLOCK_128X128 as BLOCK_128X128
from fp8jax.quantization.blocks import MXFP8 as MXFP8
from fp8jax.quantization.blocks import NVFP4_1X16 as NVFP4_1X16
from fp8jax.quantization.blocks import NVFP4_16X16 as NVFP4_16X16
from fp8jax.quantization.blocks import BlockMethod as BlockMethod
from fp8jax.quantization.blocks import hadamard as hadamard
from fp8jax.quantization.blocks import quantize_blocks as quantize_blocks
from fp8jax.quantization.blocks import quantize_in as quantize_in
from fp8jax.quantization.blocks import quantize_like as quantize_like
from fp8jax.quantization.gradient import ABSURD as ABSURD
from fp8jax.quantization.gradient import NO_TAG as NO_TAG
from fp8jax.quantization.gradient import ScaledGradient as ScaledGradient
from fp8jax.quantization.gradient import as_gradients as as_gradients
from fp8jax.quantization.gradient import like_gradient as like_gradient
from fp8jax.quantization.gradient import plain as plain
from fp8jax.quantization.gradient import scale_of_bits as scale_of_bits
from fp8jax.quantization.kernels import quantize_rows_and_columns as quantize_rows_and_columns
from fp8jax.quantization.kernels import quantize_rows_and_columns_fp4 as quantize_rows_and_columns_fp4
from fp8jax.quantization.kernels.tiles import COLUMNS as COLUMNS
from fp8jax.quantization.kernels.tiles import ENTRIES as ENTRIES
from fp8jax.quantization.kernels.tiles import ROWS as ROWS
from fp8jax.quantization.kernels.tiles import Computed as Computed
from fp8jax.quantization.kernels.tiles import Expression as Expression
from fp8jax.quantization.kernels.tiles import Operation as Operation
from fp8jax.quantization.packed import PackedE2M1 as PackedE2M1
from fp8jax.quantization.quantize import amax as amax
from fp8jax.quantization.quantize import amax_of_floats as amax_of_floats
from fp8jax.quantization.quantize import quantize as quantize
from fp8jax.quantization.quantize import quantize_by as quantize_by
from fp8jax.quantization.quantize import quantize_gradient as quantize_gradient
from fp8jax.quantization.quantize import without_infinities as without_infinities
from fp8jax.quantization.restored_dicts import refuse_dicts as refuse_dicts
from fp8jax.quantization.rounding import bits_of as bits_of
from fp8jax.quantization.rounding import cast as cast
from fp8jax.quantization.rounding import cast_stochastically as cast_stochastically
from fp8jax.quantization.rounding import from_bytes as from_bytes
from fp8jax.quantization.rounding import leaf_seeds as leaf_seeds
from fp8jax.quantization.rounding import nearest as nearest
from fp8jax.quantization.rounding import other_bits as other_bits
from fp8jax.quantization.rounding import random_bits as random_bits
from fp8jax.quantization.rounding import remainder_of as remainder_of
from fp8jax.quantization.rounding import select as select
from fp8jax.quantization.rounding import stochastic_codes as stochastic_codes
from fp8jax.quantization.rounding import to_bits as to_bits
from fp8jax.quantization.rounding import to_bytes as to_bytes
from fp8jax.quantization.scales import FIRST_SCALES as FIRST_SCALES
from fp8jax.quantization.scales import MAX_SCALE as MAX_SCALE
from fp8jax.quantization.scales import MIN_SCALE as MIN_SCALE
from fp8jax.quantization.scales import TYPICAL as TYPICAL
from fp8jax.quantization.scales import UNSET as UNSET
from fp8jax.quantization.scales import factor_of as factor_of
from fp8jax.quantization.scales import largest_scale as largest_scale
from fp8jax.quantization.scales import scale_of as scale_of
from fp8jax.quantization.scales import usable as usable
