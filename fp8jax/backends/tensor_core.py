"""The FP8 matrix product of a tile, in a Pallas kernel on Triton.

    part = tensor_core.dot(a, b)      # (m, k) and (n, k) in E4M3 -> (m, n) in float32

`jax.lax.dot_general` does not let Triton add in less than float32, as Hopper's FP8 instruction (wgmma) does.
Triton then converts the tiles to FP16 and uses an instruction of Ampere.
"""

import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jaxtyping import Array, Float, Float32

_dot_p = jex.Primitive("fp8_tile_dot")


def dot(a: Float[Array, "m k"], b: Float[Array, "n k"]) -> Float32[Array, "m n"]:
    """`a` times `b` transposed, added in float32, on Hopper in about 14 bits; `k` is small for that reason.

    References:
        DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
    """
    _register()
    return _dot_p.bind(a, b)


@functools.cache
def _register() -> None:
    """Tells Pallas how Triton computes it: Pallas has no public way."""
    try:
        from jax._src.lib.triton import dialect
        from jax._src.pallas.triton import lowering
    except ImportError:  # a JAX without Triton, where only a CPU's emulation is left
        return
    from jaxlib.mlir import ir

    def lower(_: Any, a: Any, b: Any) -> Any:
        shape = (a.type.shape[0], b.type.shape[0])
        tile = ir.RankedTensorType.get(shape, ir.F32Type.get())
        zeros = lowering._full(tile, 0.0)
        return dialect.dot(a, dialect.trans(b, (1, 0)), zeros, max_num_imprecise_acc=a.type.shape[1])

    lowering.register_lowering(_dot_p)(lower)


def _emulated(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@_dot_p.def_abstract_eval
def _shape(a: Any, b: Any) -> Any:
    return a.update(shape=(a.shape[0], b.shape[0]), dtype=jnp.dtype(jnp.float32), weak_type=False)


mlir.register_lowering(_dot_p, mlir.lower_fun(_emulated, multiple_results=False))
