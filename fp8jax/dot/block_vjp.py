"""The custom VJP of the block-scaled dot; see `fp8jax.scaling.block` for its operands.

The residuals are lhs quantized for wgrad, and the kernel as it is stored: the backward quantizes it for
dgrad. So no second copy of a kernel is in memory between forward and backward, and a sharded kernel is
gathered again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends
from fp8jax.dot.layout import contract
from fp8jax.dot.vjp import (
    CASTS,
    DGRAD,
    FP8_OPERANDS,
    FPROP,
    ONCE,
    WGRAD,
    DotStatic,
    State,
    checked,
    cotangents,
    kernel_gradient,
)
from fp8jax.platforms import differentiable_once, gpu_barrier
from fp8jax.quantization import PackedE2M1, ScaledArray, to_bytes, value
from fp8jax.scaling import block
from fp8jax.scaling.merge import from_fm32


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static: DotStatic, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, has_backward=False)[0]


def _forward(
    static: DotStatic, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State, *, has_backward: bool = True
) -> tuple[jax.Array, Any]:
    """The output and the residuals."""
    fprop_is_high, _, wgrad_is_high = static.recipe.override_linear_precision
    state = lax.stop_gradient(from_fm32(state))
    rows, kernel = static.layout.lhs.to_matrix(lhs), _kernel(static, rhs)
    has_wgrad = has_backward and static.has_wgrad
    uses = (not fprop_is_high, has_wgrad and not wgrad_is_high)
    for_fprop, for_wgrad = _quantized(static, block.LHS, rows, state, uses)
    with jax.named_scope(FPROP):
        if fprop_is_high:
            out = _multiply_high(static, rows, kernel, "mk,kn", static.out_dtype)
        else:
            right, _ = _quantized(static, block.RHS, kernel, state, (True, False))
            out = _multiply(static, for_fprop, right, static.out_dtype)
        out = out[..., : rows.shape[-2], : kernel.shape[-1]]
    kept = None
    if has_wgrad:
        kept = rows.astype(static.out_dtype) if wgrad_is_high else _packed(for_wgrad)
    kept = checkpoint_name(kept, FP8_OPERANDS)
    # Codes have no tangents. This zero carries those of the operands, so that a second derivative raises.
    mark = differentiable_once(jnp.zeros(()), (lhs, rhs, grad_slot), ONCE)
    return differentiable_once(out, mark, ONCE), ((kept, rhs), mark, state)


def _backward(static: DotStatic, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    (lhs, rhs), mark, state = residuals
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, grad.dtype)
    (lhs, rhs), grad = static.placement.after((lhs, rhs), grad)
    _, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    (_, columns), (*_, inner) = grad.shape[-2:], static.layout.lhs.matrix
    kernel, uses = _kernel(static, rhs), (not dgrad_is_high, static.has_wgrad and not wgrad_is_high)
    for_dgrad, for_wgrad = _quantized(static, block.GRAD, grad, state, uses)
    with jax.named_scope(DGRAD):
        if dgrad_is_high:
            dlhs = _multiply_high(static, grad, kernel, "mn,kn", static.out_dtype)
        else:
            _, right = _quantized(static, block.RHS, kernel, state, (False, True))
            dlhs = _multiply(static, for_dgrad, right, static.out_dtype)
        dlhs = dlhs[..., : grad.shape[-2], :inner]
    drhs: Any = None
    if static.has_wgrad:
        with jax.named_scope(WGRAD):
            if wgrad_is_high:
                drhs = _multiply_high(static, lhs, grad, "mk,mn", static.wgrad_dtype)
            else:
                drhs = _multiply(static, _unpacked(lhs, static, block.LHS), for_wgrad, static.wgrad_dtype)
            drhs = static.layout.rhs.to_tensor(drhs[..., :inner, :columns])
    dlhs = static.layout.lhs.to_tensor(dlhs).astype(static.lhs_dtype)
    drhs, state = kernel_gradient(static, drhs, {**state, **block.update(state)})
    return differentiable_once(cotangents(static, dlhs, drhs, state), (grad, mark), ONCE)


def _forward_rule(static: DotStatic, *operands: Any) -> tuple[jax.Array, Any]:
    return _forward(static, *checked(*operands))


_dot.defvjp(_forward_rule, _backward, symbolic_zeros=True)

# Jitted, so that dots of the same shapes are traced and differentiated once.
jitted_block_dot = jax.jit(_dot, static_argnums=0)


def _kernel(static: DotStatic, rhs: Any) -> jax.Array:
    """The all-gathered kernel as a matrix, in high precision."""
    return static.layout.rhs.to_matrix(value(static.placement.gathered(rhs)))


def _quantized(
    static: DotStatic, operand: int, x: jax.Array, state: State, uses: tuple[bool, bool]
) -> tuple[Any, Any]:
    """An operand for its first and its second GEMM; None where it is not used.

    It is behind a barrier: XLA on GPU would store the high-precision tensor.
    """
    gemms = tuple(gemm for gemm, is_used in enumerate(uses) if is_used)
    if not gemms:
        return None, None
    with jax.named_scope(CASTS[operand]):
        copies = block.quantized(static.recipe, operand, x, state, gemms)
    copies = (_unpacked(q, static, operand) for q in gpu_barrier(tuple(map(_packed, copies))))
    made = dict(zip(gemms, copies, strict=True))
    return made.get(0), made.get(1)


def _packed(q: ScaledArray) -> ScaledArray:
    """`q` with its codes as bytes, the storage of residuals."""
    return q if isinstance(q.data, PackedE2M1) else ScaledArray(to_bytes(q.data), q.scale)


def _unpacked(q: ScaledArray, static: DotStatic, operand: int) -> ScaledArray:
    """The inverse of `_packed`."""
    if isinstance(q.data, PackedE2M1):
        return q
    format = block.method_of(static.recipe, operand).format
    return ScaledArray(lax.bitcast_convert_type(q.data, format.dtype), q.scale)


def _multiply(static: DotStatic, lhs: ScaledArray, rhs: ScaledArray, dtype: Any) -> jax.Array:
    """The GEMM of two operands with the contracted axis last."""
    return backends.block.dot(lhs, rhs, out_dtype=dtype)


def _multiply_high(static: DotStatic, lhs: Any, rhs: Any, spec: str, dtype: Any) -> jax.Array:
    """The GEMM of two matrices in high precision."""
    lhs, rhs = (value(x).astype(static.out_dtype) for x in (lhs, rhs))
    out = lax.dot_general(
        lhs, rhs, contract(spec, static.layout.is_batched), preferred_element_type=jnp.float32
    )
    return out.astype(dtype)
