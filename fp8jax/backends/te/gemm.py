"""FP8 GEMMs by TransformerEngine, and the check that it can run here.

    supports(None, False)                     # None, or "transformer_engine is not installed"
    dot(lhs, rhs, numbers, out_dtype=jnp.bfloat16, precise=True)

The GEMM takes two matrices of codes and their scales. Matrices are transposed if the GPU requires the
contracted dim last in memory, and padded to the sizes that cuBLASLt requires.
"""

import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fp8jax.backends import xla
from fp8jax.backends.base import Backend, Call, Device, lacks_fp8
from fp8jax.quantization import ScaledArray

# cuBLASLt needs FP8 matrices with sides that are multiples of 16 bytes.
_MULTIPLE = 16


def supports(device: Device | None, is_batched: bool) -> str | None:
    """None, or the reason why TransformerEngine has no GEMMs here; see `fp8jax.backends.base.Backend`."""
    if reason := _why_not_importable():
        return reason
    device = device or Device.here()
    if device.capability is None:
        return f"transformer_engine needs an NVIDIA GPU, and {device.name} is none"
    of_batches = "transformer_engine multiplies no batches of matrices" if is_batched else None
    return lacks_fp8(device) or of_batches


def dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    """The GEMM of two matrices; see `fp8jax.backends.base.Backend`."""
    dims, _ = dimension_numbers
    multiply = functools.partial(_multiply, dims, out_dtype, precise)
    # sequential_vmap, because TransformerEngine's GEMM has no batching rule for this.
    return jax.custom_batching.sequential_vmap(multiply)(lhs.data, lhs.scale, rhs.data, rhs.scale)


def _multiply(
    dims: tuple[Any, Any],
    out_dtype: Any,
    precise: bool,
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
) -> jax.Array:
    """One TransformerEngine GEMM."""
    quantize = importlib.import_module("transformer_engine.jax.quantize")
    gemm, is_plain = _gemm()
    # Its plain JAX version casts before it scales, and XLA on CPU accumulates in the dtype of that cast.
    dq_dtype = jnp.float32 if is_plain else out_dtype
    ((lhs_k,), (rhs_k,)) = dims
    m, n = lhs.shape[1 - lhs_k], rhs.shape[1 - rhs_k]
    lhs, rhs = _padded(lhs), _padded(rhs)
    if not quantize.is_fp8_gemm_with_all_layouts_supported():  # before Blackwell the contracted dim is last
        lhs, rhs, lhs_k, rhs_k = _with_last(lhs, lhs_k), _with_last(rhs, rhs_k), 1, 1

    def scaled(data: jax.Array, scale: jax.Array) -> Any:
        return quantize.ScaledTensorFactory.create_1x(
            data=data,
            scale_inv=scale.reshape(1),
            scaling_mode=quantize.ScalingMode.DELAYED_TENSOR_SCALING,
            dq_dtype=dq_dtype,
            flatten_axis=1,
        )

    operands = scaled(lhs, lhs_scale), scaled(rhs, rhs_scale)
    out = gemm(*operands, contracting_dims=((lhs_k,), (rhs_k,)), use_split_accumulator=precise)
    return out[:m, :n].astype(out_dtype)


def _gemm() -> tuple[Any, bool]:
    """TransformerEngine's GEMM, and whether it is the plain JAX version, which it uses without custom calls.

    Its public `gemm` is not used, because an environment variable sets one accumulation precision for forward
    and backward.
    """
    module = importlib.import_module("transformer_engine.jax.cpp_extensions.gemm")
    if module.GemmPrimitive.enabled():
        return module._te_gemm, False
    return module._jax_gemm, True


def _with_last(x: jax.Array, axis: int) -> jax.Array:
    """A matrix with `axis` last."""
    # Without the constraint XLA may choose a layout with a free transpose for all preceding tensors, and
    # transpose a high-precision tensor.
    return x if axis == 1 else with_layout_constraint(x, Layout(major_to_minor=(0, 1))).T


def _padded(x: jax.Array) -> jax.Array:
    """A matrix, padded with zeros to sides that cuBLASLt supports."""
    return jnp.pad(x, [(0, -size % _MULTIPLE if size else _MULTIPLE) for size in x.shape])


@functools.cache
def _why_not_importable() -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    try:
        importlib.import_module("transformer_engine.jax")
        _gemm()
    except Exception as error:  # a missing library, GPU or component raises different types of exceptions
        return f"transformer_engine.jax cannot be used: {type(error).__name__}: {error}".splitlines()[0]
    return None


BACKEND = Backend(
    gemms="TransformerEngine's cuBLASLt calls",
    norms=xla.BACKEND.norms,  # XLA compiles everything around the GEMMs
    granularities=("tensor",),
    dot=dot,
    supports=supports,
    is_for_meshes=False,
    calls=(Call("te_gemm_v2_ffi", "te", rhs=2),),  # scales follow their operands
)
