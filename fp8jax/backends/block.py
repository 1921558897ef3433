"""GEMMs of operands with a scale for each block.

Both operands have the contracted axis last, (m, k) and (n, k), as GPU instructions read them.

| operands | CPU | Hopper | Blackwell |
|---|---|---|---|
| 1x128 and 128x128 | exact emulation | the Pallas kernel | the Pallas kernel |
| MXFP8, NVFP4 | exact emulation | not there | `jax.nn.scaled_matmul`, one cuDNN call |
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.backends import cudnn, pallas
from fp8jax.backends.pallas import TILING, Tiling
from fp8jax.platforms import by_platform, capability_of
from fp8jax.quantization import ScaledArray, is_scaled

# Compute capability of the first GPUs with GEMMs of FP8, and of MXFP8 and NVFP4.
FIRST_WITH_FP8, FIRST_WITH_BLOCKS = (8, 9), (10, 0)


def why_not(scaling: str) -> str | None:
    """None, or the reason why JAX's default device has no GEMMs for this scaling, and what to use instead."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    capability = capability_of(device)
    if capability is None:
        return f"{device.device_kind} is no NVIDIA GPU, and has no GEMMs of blocks here; use the recipe te"
    return lacks(capability, scaling)


def backend_of(scaling: str) -> str:
    """The backend of block-scaled GEMMs on JAX's default device: "xla" on a CPU, else "pallas" or "cudnn"."""
    if jax.devices()[0].platform == "cpu":
        return "xla"
    return "cudnn" if scaling in ("mxfp8", "nvfp4") else "pallas"


def lacks(capability: tuple[int, int], scaling: str) -> str | None:
    """None, or the reason why GPUs of a compute capability have no GEMMs for a scaling, and what to use."""
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if capability < FIRST_WITH_FP8:
        return f"{shown} has no FP8 GEMMs, which need 8.9; use the recipe bf16"
    if scaling in ("mxfp8", "nvfp4") and capability < FIRST_WITH_BLOCKS:
        return f"{shown} has no GEMMs of MXFP8 or NVFP4, which need 10.0; use the recipe block or te"
    return None


def dot(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, tiling: Tiling = TILING) -> jax.Array:
    """([batch,] m, k) times ([batch,] n, k), accumulated in float32.

    The product of two blocks is scaled before it is added to the output's float32 sum. Hopper adds the 128
    products of a block in about 14 bits.
    """
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), out_dtype)
    static = {"out_dtype": out_dtype, "tiling": tiling}
    return by_platform(lhs, rhs, cpu=_emulated, default=_on_gpu, is_deferred=False, **static)


def _emulated(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, tiling: Tiling) -> jax.Array:
    batch = tuple(range(lhs.ndim - 2))
    numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))
    out = lax.dot_general(lhs.dequantize(), rhs.dequantize(), numbers, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _on_gpu(lhs: ScaledArray, rhs: ScaledArray, *, out_dtype: Any, tiling: Tiling = TILING) -> jax.Array:
    has_float32_scales = not is_scaled(lhs.scale) and lhs.scale.dtype == jnp.float32
    gemm = functools.partial(pallas.gemm, tiling=tiling) if has_float32_scales else cudnn.gemm
    if lhs.ndim == 2:
        lhs, rhs = (jax.tree.map(lambda leaf: leaf[None], x) for x in (lhs, rhs))
        return gemm(lhs, rhs, out_dtype)[0]
    return gemm(lhs, rhs, out_dtype)
