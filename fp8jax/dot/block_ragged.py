"""The custom VJP of the block-scaled `ragged_dot`.

Kernels are quantized once for each GEMM. FP8 rows are quantized once, too, with each group padded to whole
blocks, because the scale blocks of wgrad run along rows; the residual is the copy for wgrad. NVFP4's rows are
quantized within the GEMMs of `fp8jax.dot.row_tiles`, whose blocks have one scale for all their rows, so their
residual is in high precision.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends
from fp8jax.dot.block_vjp import from_residual, quantized_kernel, quantized_operand, to_residual
from fp8jax.dot.layout import Side, contract, on_data
from fp8jax.dot.row_tiles import (
    Multiply,
    columns_times_columns,
    in_aligned_groups,
    on_each,
    rows_times_matrices,
    rows_times_rows,
)
from fp8jax.dot.vjp import (
    DGRAD,
    FP8_OPERANDS,
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
from fp8jax.quantization import ScaledArray, value
from fp8jax.scaling import block
from fp8jax.scaling.merge import from_cotangents

# The three GEMMs, in the order of `Recipe.override_linear_precision`.
_SPECS = ("mk,kn", "mn,kn", "mk,mn")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(static: RaggedStatic, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, sizes)[0]


def _forward(
    static: RaggedStatic, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any
) -> tuple[Any, Any]:
    """The output and the residuals."""
    state = lax.stop_gradient(from_cotangents(state))
    out, kept = on_each(functools.partial(_output, static), static.over)(lhs, rhs, state, sizes)
    mark = differentiable_once(jnp.zeros(()), (lhs, rhs, grad_slot), ONCE)
    kept = checkpoint_name(kept, FP8_OPERANDS)
    return differentiable_once(out, mark, ONCE), (kept, rhs, mark, state, sizes)


def _output(static: RaggedStatic, lhs: Any, rhs: Any, state: State, sizes: Any) -> tuple[jax.Array, Any]:
    """The output of this device's groups, and the rows for wgrad."""
    is_high, _, wgrad_is_high = static.recipe.override_linear_precision
    rows, side = lhs.astype(static.out_dtype), _side(static, rhs)
    (for_fprop, for_wgrad), aligned = _rows(static, block.LHS, rows, state, sizes, (is_high, wgrad_is_high))
    with jax.named_scope(FPROP):
        kernels = _kernels(static, rhs, state, 0, is_high)
        shape = jax.ShapeDtypeStruct((lhs.shape[0], side.shape[2]), static.out_dtype)
        multiply = _gemm(static, block.LHS, "mk,kn", static.out_dtype, {}, side.shape[2])
        options = _options(static, aligned, is_high)
        out = rows_times_matrices(for_fprop, kernels, sizes, multiply, shape, **options)
    return out, for_wgrad if static.has_wgrad else None


def _backward(static: RaggedStatic, residuals: Any, grad: Any) -> tuple[Any, ...]:
    kept, rhs, mark, state, sizes = residuals
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, static.out_dtype)
    on_device = on_each(functools.partial(_gradients, static), static.over)
    grads = (*cotangents(static, *on_device(kept, rhs, state, sizes, grad)), None)
    return differentiable_once(grads, (grad, mark), ONCE)


def _gradients(
    static: RaggedStatic, kept: Any, rhs: Any, state: State, sizes: Any, grad: Any
) -> tuple[Any, Any, State]:
    """The gradients of this device's rows and kernels, and the new states."""
    rhs, grad = static.placement.after(rhs, grad)
    _, is_high, wgrad_is_high = static.recipe.override_linear_precision
    side, dtype, rows = _side(static, rhs), static.out_dtype, grad.astype(static.out_dtype)
    key = {"key": state["key"][0]} if "key" in state else {}
    (for_dgrad, for_wgrad), aligned = _rows(static, block.GRAD, rows, state, sizes, (is_high, wgrad_is_high))
    with jax.named_scope(DGRAD):
        kernels = _kernels(static, rhs, state, 1, is_high)
        shape = jax.ShapeDtypeStruct((grad.shape[0], side.shape[1]), static.lhs_dtype)
        multiply = _gemm(static, block.GRAD, "mn,kn", dtype, key, side.shape[1])
        options = _options(static, aligned, is_high)
        dlhs = rows_times_matrices(for_dgrad, kernels, sizes, multiply, shape, **options)
    drhs = None
    if static.has_wgrad:
        with jax.named_scope(WGRAD):
            multiply = _gemm(static, block.LHS, "mk,mn", jnp.float32, key, side.shape[2])
            if isinstance(kept, ScaledArray):
                drhs = columns_times_columns(kept, for_wgrad, aligned, multiply, side.shape)
            else:
                drhs = rows_times_rows(kept, for_wgrad, sizes, multiply, side.shape)
    state = {**state, **block.update(state)}
    return dlhs, *kernel_gradient(static, drhs, state, groups=sizes.shape[0])


def _forward_rule(static: RaggedStatic, *operands: Any) -> tuple[jax.Array, Any]:
    return _forward(static, *checked(*operands))


_ragged.defvjp(_forward_rule, _backward, symbolic_zeros=True)
jitted_block_ragged = jax.jit(_ragged, static_argnums=0)


def _has_scale_of_rows(static: RaggedStatic) -> bool:
    """Whether rows share a scale: NVFP4's of the tensor, here of a block of rows."""
    return static.recipe.scaling == "nvfp4"


def _side(static: RaggedStatic, rhs: Any) -> Side:
    shape = static.placement.whole_shape(rhs.shape)
    return Side(shape, (0, 1, 2), shape)


def _kernels(static: RaggedStatic, rhs: Any, state: State, gemm: int, is_high: bool) -> Any:
    """The whole kernels, quantized for their GEMM, or in high precision."""
    if is_high:
        return value(on_data(static.placement.gathered, rhs)).astype(static.out_dtype)
    return to_residual(quantized_kernel(static, _side(static, rhs), rhs, state, gemm))


def _rows(
    static: RaggedStatic, operand: int, rows: jax.Array, state: State, sizes: jax.Array, is_high: Any
) -> tuple[tuple[Any, Any], jax.Array]:
    """The rows for their two GEMMs, and the sizes of their groups.

    Quantized rows are in aligned groups, so that a scale block of wgrad has rows of one group. NVFP4's, which
    share a scale, are quantized within the GEMMs.
    """
    if _has_scale_of_rows(static):
        return (rows, rows), sizes
    uses = (not is_high[0], not is_high[1] and static.has_wgrad)
    padded, aligned = in_aligned_groups(rows, sizes, block.method_of(static.recipe, operand).block[1])
    copies = quantized_operand(static, operand, padded, state, uses)
    pairs = zip(copies, uses, strict=True)
    first, second = (to_residual(q) if is_used else rows for q, is_used in pairs)
    return (first, second), aligned


def _options(static: RaggedStatic, aligned: jax.Array, is_high: bool) -> dict[str, Any]:
    """The options of `rows_times_matrices` for what `_rows` returns."""
    if is_high or _has_scale_of_rows(static):
        return {"is_separate": _has_scale_of_rows(static)}
    return {"aligned": aligned, "least": block.method_of(static.recipe, block.LHS).block[1]}


def _gemm(static: RaggedStatic, left: int, spec: str, dtype: Any, state: State, columns: int) -> Multiply:
    """The GEMM of one block of rows.

    Args:
        static: the static arguments.
        left: the number of the left operand; the right one is a kernel, in wgrad the gradient.
        spec: as in `contract`.
        dtype: of the output.
        state: the state of a dot.
        columns: of the output.
    """
    number = _SPECS.index(spec)
    right = block.GRAD if number == 2 else block.RHS
    is_high = static.recipe.override_linear_precision[number]

    def operand(which: int, x: Any) -> ScaledArray:
        if isinstance(x, ScaledArray):
            return from_residual(x, static, which)
        return block.quantized(static.recipe, which, x, state, (int(number == 2),))[0]

    def multiply(lhs: Any, rhs: Any) -> jax.Array:
        if is_high:
            return gemm(static, lhs, rhs, contract(spec), True, dtype)
        rows = lhs.shape[0] if number < 2 else lhs.shape[1] if not isinstance(lhs, ScaledArray) else None
        out = backends.block.dot(operand(left, lhs), operand(right, rhs), out_dtype=dtype)
        return out[:rows, :columns]

    return multiply
