"""High-precision `jax.lax.ragged_dot`, computed in blocks as the FP8 one (`fp8jax.dot.ragged`).

    >>> import jax.numpy as jnp
    >>> from fp8jax.dot import wide_ragged_dot
    >>> wide_ragged_dot(jnp.ones((3, 4)), jnp.ones((2, 4, 5)), jnp.array([1, 2])).shape
    (3, 5)

On CPU and GPU, XLA computes `jax.lax.ragged_dot` as a matmul of every row with every group's matrix: work and
memory grow with the number of groups.
"""

from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir

from fp8jax.dot.layout import contract
from fp8jax.dot.row_tiles import ExpertSharding, Multiply, on_each, rows_times_matrices, rows_times_rows
from fp8jax.platforms import jvp_of

# A primitive, so that `rewrite` finds it as one equation of a jaxpr.
RAGGED = "fp8jax_ragged_dot"
_ragged_p = jex.Primitive(RAGGED)


def wide_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, over: ExpertSharding | None = None
) -> jax.Array:
    """`lax.ragged_dot(lhs, rhs, group_sizes)`, accumulated in float32.

    Args:
        lhs: float array, shape=(rows, k), with the rows sorted by group.
        rhs: float array, shape=(groups, k, n).
        group_sizes: integers, shape=(groups,). Rows past their sum have output 0 and no gradient.
        over: the mesh axis that shards the groups, as in `ragged_dot`.

    Returns:
        Array of shape (rows, n), in the promoted dtype. It supports reverse mode, but not forward mode.
    """
    return _ragged_p.bind(lhs, rhs, group_sizes, over=over)


@_ragged_p.def_impl
def _ragged(lhs: Any, rhs: Any, group_sizes: Any, *, over: ExpertSharding | None) -> jax.Array:
    return on_each(_of_device, over)(lhs, rhs, group_sizes)


@_ragged_p.def_abstract_eval
def _abstract(lhs: Any, rhs: Any, group_sizes: Any, *, over: ExpertSharding | None) -> Any:
    del group_sizes, over
    return jax.core.ShapedArray((lhs.shape[0], rhs.shape[2]), jnp.promote_types(lhs.dtype, rhs.dtype))


ad.primitive_jvps[_ragged_p] = jvp_of(_ragged)
mlir.register_lowering(_ragged_p, mlir.lower_fun(_ragged, multiple_results=False))


@jax.custom_vjp
def _of_device(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[2]), jnp.promote_types(lhs.dtype, rhs.dtype))
    return rows_times_matrices(lhs, rhs, group_sizes, _gemm("mk,kn"), shape)


def _backward(kept: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = kept
    like = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype)
    dlhs = rows_times_matrices(grad, rhs, sizes, _gemm("mn,kn"), like)
    drhs = rows_times_rows(lhs, grad, sizes, _gemm("mk,mn"), rhs.shape)
    return dlhs, drhs.astype(rhs.dtype), None


_of_device.defvjp(lambda *operands: (_of_device(*operands), operands), _backward)


def _gemm(spec: str) -> Multiply:
    """A GEMM with float32 output."""
    numbers = contract(spec)
    return lambda lhs, rhs: lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)
