"""Pallas kernels that quantize a matrix for both of its GEMMs at once."""

from fp8jax.quantization.kernels.rows_and_columns import (
    quantize_rows_and_columns as quantize_rows_and_columns,
)
from fp8jax.quantization.kernels.rows_and_columns_fp4 import (
    quantize_rows_and_columns_fp4 as quantize_rows_and_columns_fp4,
)
