"""The custom VJP of the block-scaled dot; see `fp8jax.scaling.block` for its operands.

The residuals are lhs quantized for wgrad, and the kernel as it is stored: the backward quantizes it for
dgrad. So no second copy of a kernel is in memory between forward and backward, and a sharded kernel is
gathered again, as the codes and scales of dgrad.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends
from fp8jax.dot.layout import Shard, Side, contract
from fp8jax.dot.vjp import (
    CASTS,
    DGRAD,
    FP8_OPERANDS,
    FPROP,
    ONCE,
    WGRAD,
    DotStatic,
    State,
    Static,
    checked,
    cotangents,
    kernel_gradient,
)
from fp8jax.platforms import differentiable_once, gpu_barrier
from fp8jax.quantization import PackedE2M1, ScaledArray, amax, to_bytes, value
from fp8jax.scaling import block
from fp8jax.scaling.merge import from_cotangents
from fp8jax.scaling.stored import operand_of_stored


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static: DotStatic, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, has_backward=False)[0]


def _forward(
    static: DotStatic, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State, *, has_backward: bool = True
) -> tuple[jax.Array, Any]:
    """The output and the residuals."""
    fprop_is_high, _, wgrad_is_high = static.recipe.override_linear_precision
    state = lax.stop_gradient(from_cotangents(state))
    rows, columns = static.layout.lhs.to_matrix(lhs), static.layout.rhs.matrix[-1]
    has_wgrad = has_backward and static.has_wgrad
    uses = (not fprop_is_high, has_wgrad and not wgrad_is_high)
    for_fprop, for_wgrad = quantized_operand(static, block.LHS, rows, state, uses)
    with jax.named_scope(FPROP):
        if fprop_is_high:
            out = _multiply_high(static, rows, _kernel(static, rhs), "mk,kn", static.out_dtype)
        else:
            right = quantized_kernel(static, static.layout.rhs, rhs, state, 0)
            out = _multiply(static, for_fprop, right, static.out_dtype)
        out = out[..., : rows.shape[-2], :columns]
    kept = None
    if has_wgrad:
        kept = rows.astype(static.out_dtype) if wgrad_is_high else to_residual(for_wgrad)
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
    uses = (not dgrad_is_high, static.has_wgrad and not wgrad_is_high)
    for_dgrad, for_wgrad = quantized_operand(static, block.GRAD, grad, state, uses)
    with jax.named_scope(DGRAD):
        if dgrad_is_high:
            dlhs = _multiply_high(static, grad, _kernel(static, rhs), "mn,kn", static.out_dtype)
        else:
            right = quantized_kernel(static, static.layout.rhs, rhs, state, 1)
            dlhs = _multiply(static, for_dgrad, right, static.out_dtype)
        dlhs = dlhs[..., : grad.shape[-2], :inner]
    drhs: Any = None
    if static.has_wgrad:
        with jax.named_scope(WGRAD):
            if wgrad_is_high:
                drhs = _multiply_high(static, lhs, grad, "mk,mn", static.wgrad_dtype)
            else:
                drhs = _multiply(static, from_residual(lhs, static, block.LHS), for_wgrad, static.wgrad_dtype)
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


def quantized_kernel(static: Static, side: Side, rhs: Any, state: State, gemm: int) -> ScaledArray:
    """The whole kernel, quantized for its first GEMM (0) or its second one (1).

    A sharded kernel is quantized in shards, and all-gathered as codes and scales, if the shards have whole
    blocks and it is stored in more bytes. Then the result is the same to the bit.
    """
    is_as_stored = len(side.matrix) == 2 and side.order == tuple(range(rhs.ndim))
    if isinstance(rhs, ScaledArray) and is_as_stored and not static.placement.is_part:
        stored = operand_of_stored(static.recipe, rhs, side.matrix[0], gemm)
        if stored is not None:
            return stored
    uses = (gemm == 0, gemm == 1)
    shard = _shard_of_blocks(static, side, rhs, gemm)
    if shard is None:
        kernel = side.to_matrix(value(static.placement.gathered(rhs)))
        return quantized_operand(static, block.RHS, kernel, state, uses)[gemm]
    part, whole_amax = shard.side.to_matrix(value(rhs)), None
    if static.recipe.gemm == "FP4":
        whole_amax = static.placement.common_amax(amax(part, (*part.shape[:-2], 1, 1)))
    q = quantized_operand(static, block.RHS, part, state, uses, whole_amax)[gemm]
    # The codes and the scales of blocks; NVFP4's scale of the tensor is the same on all devices.
    leaves, treedef = jax.tree.flatten(to_residual(q))
    leaves[:2] = static.placement.gathered_runs(leaves[:2], _axis(shard, gemm), shard.runs)
    return from_residual(treedef.unflatten(leaves), static, block.RHS)


def _shard_of_blocks(static: Static, side: Side, rhs: Any, gemm: int) -> Shard | None:
    """This device's shard of a kernel; None if not blocks of it are to be sent."""
    if not static.placement.is_part:
        return None
    stored = rhs.data if isinstance(rhs, ScaledArray) else rhs
    shard = side.shard(static.placement.axis, static.placement.devices)
    is_smaller = stored.dtype.itemsize > 1 or static.recipe.gemm == "FP4"
    is_whole = shard.axis > -3 and (
        shard.length % block.method_of(static.recipe, block.RHS).block[_axis(shard, gemm)] == 0
    )
    return shard if is_smaller and is_whole else None


def _axis(shard: Shard, gemm: int) -> int:
    """The sharded axis of a kernel's copy: the first GEMM's is transposed."""
    return shard.axis if gemm else -3 - shard.axis


def quantized_operand(
    static: Static,
    operand: int,
    x: jax.Array,
    state: State,
    uses: tuple[bool, bool],
    whole_amax: Any = None,
) -> tuple[Any, Any]:
    """An operand for its first and its second GEMM; None where it is not used.

    It is behind a barrier: XLA on GPU would store the high-precision tensor.
    """
    gemms = tuple(gemm for gemm, is_used in enumerate(uses) if is_used)
    if not gemms:
        return None, None
    with jax.named_scope(CASTS[operand]):
        copies = block.quantized(static.recipe, operand, x, state, gemms, whole_amax)
    copies = (from_residual(q, static, operand) for q in gpu_barrier(tuple(map(to_residual, copies))))
    made = dict(zip(gemms, copies, strict=True))
    return made.get(0), made.get(1)


def to_residual(q: ScaledArray) -> ScaledArray:
    """`q` with its codes as bytes, the storage of residuals."""
    return q if isinstance(q.data, PackedE2M1) else ScaledArray(to_bytes(q.data), q.scale)


def from_residual(q: ScaledArray, static: Static, operand: int) -> ScaledArray:
    """The inverse of `to_residual`."""
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
