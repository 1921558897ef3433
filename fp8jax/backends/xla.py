"""The XLA backend: FP8 GEMMs by cuBLASLt on GPU, exact emulation on CPU.

The platform is selected at lowering, so a program traced on a laptop compiles for an absent GPU.

GPU: XLA rewrites a dot with operands `convert(fp8) * scalar` to one `__cublas$lt$matmul$f8` call. The call
takes the float32 scales, accumulates in float32 and writes `out_dtype`. Precision DEFAULT is fast
accumulation, HIGHEST is precise.

XLA does so only while its Triton takes no GEMMs; otherwise it dequantizes the operands first, and multiplies
in bfloat16. So this module adds `--xla_gpu_enable_triton_gemm=false` to XLA_FLAGS, unless the flag is there.
JAX reads XLA_FLAGS once, when a program first uses a device; `why_not_fp8` sees whether it was in time.

CPU: FP8 values and their products are exact in float32, so a float32 dot computes the same as an FP8 dot.
"""

import concurrent.futures
import functools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.backends.base import Backend, Call, Device, lacks_fp8
from fp8jax.platforms import by_platform
from fp8jax.quantization import ScaledArray

_FLAG = "--xla_gpu_enable_triton_gemm"
# The newest JAX whose XLA is known to have the flag: a process with an unknown flag in XLA_FLAGS is killed.
_LAST = (0, 12)

# How a compiled program calls cuBLASLt's FP8 GEMM.
FP8_CALL = "__cublas$lt$matmul$f8"


def add_flag() -> None:
    """Keeps XLA's Triton from GEMMs, unless XLA_FLAGS says otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags and jax.__version_info__[:2] <= _LAST:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=false".strip()


add_flag()


def dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    out_dtype: Any,
    precise: bool,
) -> jax.Array:
    """See `fp8jax.backends.base.Backend`."""
    options = {"dimension_numbers": dimension_numbers, "out_dtype": out_dtype, "precise": precise}
    return by_platform(lhs, rhs, cpu=_dot_float32, default=_dot_on_gpu, **options)


def _dot_float32(
    lhs: ScaledArray, rhs: ScaledArray, *, dimension_numbers: Any, out_dtype: Any, precise: bool
) -> jax.Array:
    del precise  # float32 accumulation is always precise
    operands = lhs.data.astype(jnp.float32), rhs.data.astype(jnp.float32)
    out = lax.dot_general(*operands, dimension_numbers, preferred_element_type=jnp.float32)
    # Two multiplications, because the product of the scales can overflow or underflow in float32.
    return (out * lhs.scale * rhs.scale).astype(out_dtype)


def _dot_on_gpu(lhs: ScaledArray, rhs: ScaledArray, **options: Any) -> jax.Array:
    """The dot, with a warning if it is slow; traced when a program is lowered for a GPU."""
    is_for_another = jax.sharding.get_abstract_mesh().abstract_device is not None  # see `inspect.targets`
    if not is_for_another and (reason := why_not_fp8(Device.here())):
        warnings.warn(f"{reason}.", stacklevel=2)
    return _dot_scaled(lhs, rhs, **options)


def _dot_scaled(
    lhs: ScaledArray, rhs: ScaledArray, *, dimension_numbers: Any, out_dtype: Any, precise: bool
) -> jax.Array:
    # XLA's pattern needs scales in `out_dtype`; cuBLASLt gets the float32 scales.
    left, right = (x.data.astype(out_dtype) * x.scale.astype(out_dtype) for x in (lhs, rhs))
    precision = lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT
    return lax.dot_general(
        left, right, dimension_numbers, precision=precision, preferred_element_type=out_dtype
    )


def why_not_fp8(device: Device) -> str | None:
    """None, or the reason why XLA multiplies in high precision on an NVIDIA GPU.

    On a GPU with FP8 GEMMs it compiles a small GEMM for JAX's default device, once in a process.

    Args:
        device: JAX's default device.
    """
    if device.platform == "cpu" or device.capability is None:
        return None
    if reason := lacks_fp8(device):
        return f"XLA dequantizes the operands of FP8 GEMMs on {device.name}: {reason}"
    if _computes_fp8():
        return None
    return (
        "XLA computes FP8 GEMMs in bfloat16 here, because its Triton takes them. Import fp8jax before JAX "
        f"uses a device, or start the process with XLA_FLAGS={_FLAG}=false"
    )


@functools.cache
def _computes_fp8() -> bool:
    """Whether XLA compiles a dot to a call of cuBLASLt's FP8 GEMM."""

    def text() -> str:
        operand = ScaledArray(jnp.zeros((128, 128), jnp.float8_e4m3fn), jnp.ones(()))
        options: dict[str, Any] = {"dimension_numbers": (((1,), (1,)), ((), ())), "out_dtype": jnp.bfloat16}
        multiply = functools.partial(_dot_scaled, **options, precise=False)
        return jax.jit(multiply).lower(operand, operand).compile().as_text() or ""

    # In a thread of its own there is no mesh and no trace.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return FP8_CALL in thread.submit(text).result()


BACKEND = Backend(
    gemms="cuBLASLt, through XLA",
    norms="on a GPU XLA computes a norm within the cast of its output to FP8, "
    "and an activation with its amax",
    granularities=("tensor",),
    dot=dot,
    why_not_fp8=why_not_fp8,
    calls=(
        Call(FP8_CALL, "cublaslt_f8"),
        Call("__cublas$lt$matmul", "cublaslt"),
        Call("__cublas$gemm", "cublas"),
        Call("__onednn$matmul", "onednn"),
    ),
)
