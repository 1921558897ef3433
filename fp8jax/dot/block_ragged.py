"""The custom VJP of the block-scaled `ragged_dot`.

A group's rows are quantized within the GEMMs of `fp8jax.dot.row_tiles`: the scale blocks of wgrad, which run
along rows, begin with each block of rows. So the residuals are the operands in high precision.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends
from fp8jax.dot.layout import contract, on_data
from fp8jax.dot.row_tiles import Multiply, on_each, rows_times_matrices, rows_times_rows
from fp8jax.dot.vjp import (
    DGRAD,
    FPROP,
    ONCE,
    WGRAD,
    RaggedStatic,
    State,
    checked,
    cotangents,
    gemm,
    kernel_gradient,
)
from fp8jax.platforms import differentiable_once
from fp8jax.quantization import value
from fp8jax.scaling import block
from fp8jax.scaling.merge import from_fm32

# The three GEMMs, in the order of `Recipe.override_linear_precision`.
_SPECS = ("mk,kn", "mn,kn", "mk,mn")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(static: RaggedStatic, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, sizes)[0]


def _forward(
    static: RaggedStatic, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any
) -> tuple[Any, Any]:
    """The output and the residuals."""
    state = lax.stop_gradient(from_fm32(state))
    out = on_each(functools.partial(_output, static), static.over)(lhs, rhs, sizes)
    mark = differentiable_once(jnp.zeros(()), (lhs, rhs, grad_slot), ONCE)
    return differentiable_once(out, mark, ONCE), (lhs, rhs, mark, state, sizes)


def _output(static: RaggedStatic, lhs: jax.Array, rhs: Any, sizes: jax.Array) -> jax.Array:
    """The output of this device's groups."""
    with jax.named_scope(FPROP):
        kernels = _kernels(static, rhs)
        shape = jax.ShapeDtypeStruct((lhs.shape[0], kernels.shape[2]), static.out_dtype)
        multiply = _gemm(static, (block.LHS, 0), (block.RHS, 0), "mk,kn", static.out_dtype, {})
        rows = lhs.astype(static.out_dtype)
        return rows_times_matrices(
            rows, kernels, sizes, multiply, shape, is_separate=_has_scale_of_rows(static)
        )


def _backward(static: RaggedStatic, residuals: Any, grad: Any) -> tuple[Any, ...]:
    lhs, rhs, mark, state, sizes = residuals
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, static.out_dtype)
    on_device = on_each(functools.partial(_gradients, static), static.over)
    grads = (*cotangents(static, *on_device(lhs, rhs, state, sizes, grad)), None)
    return differentiable_once(grads, (grad, mark), ONCE)


def _gradients(
    static: RaggedStatic, lhs: Any, rhs: Any, state: State, sizes: Any, grad: Any
) -> tuple[Any, Any, State]:
    """The gradients of this device's rows and kernels, and the new states."""
    rhs, grad = static.placement.after(rhs, grad)
    kernels, dtype = _kernels(static, rhs), static.out_dtype
    key = {"key": state["key"][0]} if "key" in state else {}
    with jax.named_scope(DGRAD):
        shape = jax.ShapeDtypeStruct(lhs.shape, static.lhs_dtype)
        multiply = _gemm(static, (block.GRAD, 0), (block.RHS, 1), "mn,kn", dtype, key)
        rows = grad.astype(dtype)
        dlhs = rows_times_matrices(
            rows, kernels, sizes, multiply, shape, is_separate=_has_scale_of_rows(static)
        )
    with jax.named_scope(WGRAD):
        multiply = _gemm(static, (block.LHS, 1), (block.GRAD, 1), "mk,mn", jnp.float32, key)
        drhs = rows_times_rows(lhs.astype(dtype), grad.astype(dtype), sizes, multiply, kernels.shape)
    state = {**state, **block.update(state)}
    return dlhs, *kernel_gradient(static, drhs, state, groups=sizes.shape[0])


def _forward_rule(static: RaggedStatic, *operands: Any) -> tuple[jax.Array, Any]:
    return _forward(static, *checked(*operands))


_ragged.defvjp(_forward_rule, _backward, symbolic_zeros=True)
jitted_block_ragged = jax.jit(_ragged, static_argnums=0)


def _has_scale_of_rows(static: RaggedStatic) -> bool:
    """Whether rows share a scale: NVFP4's of the tensor, here of a block of rows."""
    return static.recipe.scaling == "nvfp4"


def _kernels(static: RaggedStatic, rhs: Any) -> jax.Array:
    """The all-gathered kernels in high precision."""
    return value(on_data(static.placement.gathered, rhs)).astype(static.out_dtype)


def _gemm(
    static: RaggedStatic,
    left: tuple[int, int],
    right: tuple[int, int],
    spec: str,
    dtype: Any,
    state: State,
) -> Multiply:
    """The GEMM of one block of rows.

    Args:
        static: the static arguments.
        left, right: the number of each operand, and 0 if this is its first GEMM, 1 if it is its second one.
        spec: as in `contract`.
        dtype: of the output.
        state: the state of a dot.
    """
    is_high = static.recipe.override_linear_precision[_SPECS.index(spec)]

    def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if is_high:
            return gemm(static, lhs, rhs, contract(spec), True, dtype)
        ((of_lhs,), (of_rhs,)), _ = contract(spec)
        rows, columns = lhs.shape[1 - of_lhs], rhs.shape[1 - of_rhs]
        q_lhs, q_rhs = (
            block.quantized(static.recipe, operand, x, state, (gemm,))[0]
            for (operand, gemm), x in ((left, lhs), (right, rhs))
        )
        return backends.block.dot(q_lhs, q_rhs, out_dtype=dtype)[:rows, :columns]

    return multiply
