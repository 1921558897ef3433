"""The FP8 matmul of a layer: an autograd function around its three GEMMs.

Input, weight and output gradient are quantized to FP8 once each, and the residuals are FP8. GEMMs accumulate
in float32 and multiply by both scales before they cast to the output's dtype. The weight gradient has the
weight's dtype, or is quantized to E4M3 on a power-of-two scale where the recipe says so. An output gradient
with inf or NaN makes both other gradients NaN, so that the step is skipped.

With block scaling each operand is quantized for each of its GEMMs, see `blocks`. The residuals are the input
in blocks for the wgrad GEMM, and the weight as it is stored, which the backward quantizes for dgrad.
"""

import contextlib
import math
from typing import Any

import torch
from jaxtyping import Float
from torch.autograd.function import once_differentiable

from fp8jax_torch import blocks, casts
from fp8jax_torch.gemm import gemm, high_gemm, transposed
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize, quantize_gradient, value
from fp8jax_torch.scaling.state import GRAD, LHS, RHS, ScalingState, operand_formats


def matmul(
    x: Float[torch.Tensor, "... k"],
    weight: Float[torch.Tensor, "a b"],
    state: ScalingState,
    *,
    in_out: bool,
    dtype: torch.dtype,
) -> Float[torch.Tensor, "... n"]:
    """`x @ weight.T` in FP8, as the recipe of `state` says; shape=(..., n), in `dtype`.

    The weight is plain or a `ScaledTensor`, shape=(n, k), or (k, n) if `in_out`, as in transformers' Conv1D.
    The gradient for `x` has its dtype; the gradient for `weight` has the weight's, or is an E4M3
    `ScaledTensor`.
    """
    with without_autocast(x.device):
        matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is undefined with a size of 0
        is_trained = torch.is_grad_enabled()
        if not is_trained:
            weight = weight.detach()  # so that nothing is quantized for a backward
        if state.recipe.has_blocks:
            out: Any = _BlockMatmul.apply(matrix, weight, state, in_out, dtype)
        else:
            is_frozen = is_trained and not (matrix.requires_grad or weight.requires_grad)
            out = _Matmul.apply(matrix, weight, state, in_out, dtype, is_frozen)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast."""
    if not torch.amp.is_autocast_available(device.type):  # as on "meta"
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, state: ScalingState, in_out: bool, dtype: Any, is_frozen: bool
    ) -> Any:
        fprop_is_high, dgrad_is_high, wgrad_is_high = state.recipe.override_linear_precision
        weight_dtype = weight.dtype
        if is_scaled(weight):
            weight = ScaledTensor(weight.codes, weight.scale)  # of float32 values, as on the JAX side
        x_amax, q_x = _quantize(state, LHS, x)
        weight_amax, q_weight = _quantize(state, RHS, weight)
        if is_frozen:  # no backward will record the amaxes
            state.record([x_amax, weight_amax, torch.zeros_like(x_amax)])
        high_x = value(x).to(dtype) if fprop_is_high or wgrad_is_high else None
        high_weight = value(weight).to(dtype) if fprop_is_high or dgrad_is_high else None
        lhs, rhs = (high_x, high_weight) if fprop_is_high else (q_x, q_weight)
        out = gemm(lhs, rhs if in_out else transposed(rhs), dtype, fast=True)
        residuals: list[Any] = [
            *([high_x] if wgrad_is_high else [q_x.codes, q_x.scale]),
            *([high_weight] if dgrad_is_high else [q_weight.codes, q_weight.scale]),
        ]
        ctx.save_for_backward(x_amax, weight_amax, *residuals)
        ctx.state, ctx.in_out, ctx.dtypes = state, in_out, (x.dtype, weight_dtype, dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, in_out, (x_dtype, _, dtype) = ctx.state, ctx.in_out, ctx.dtypes
        _, dgrad_is_high, wgrad_is_high = state.recipe.override_linear_precision
        x_amax, weight_amax, *residuals = ctx.saved_tensors
        x, weight = (
            residuals.pop(0) if is_high else ScaledTensor(residuals.pop(0), residuals.pop(0))
            for is_high in (wgrad_is_high, dgrad_is_high)
        )
        [grad] = grads
        with without_autocast(grad.device):
            grad_amax, q_grad = _quantize(state, GRAD, grad)
            # Saturated, an infinite gradient would look like a large one: a NaN scale makes both gradients
            # NaN.
            q_grad = ScaledTensor(q_grad.codes, torch.where(grad_amax < math.inf, q_grad.scale, math.nan))
            state.record([x_amax, weight_amax, grad_amax])
            dx = dweight = None
            if ctx.needs_input_grad[0]:
                rhs = transposed(weight) if in_out else weight
                dx = gemm(grad.to(dtype) if dgrad_is_high else q_grad, rhs, dtype, fast=False).to(x_dtype)
            if ctx.needs_input_grad[1]:
                grad = grad.to(dtype) if wgrad_is_high else q_grad
                lhs, rhs = (x, grad) if in_out else (grad, x)
                dweight = gemm(transposed(lhs), rhs, _wgrad_dtype(ctx), fast=False)
                dweight = _weight_gradient(ctx, dweight)
        return dx, dweight, None, None, None, None


class _BlockMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, state: ScalingState, in_out: bool, dtype: Any) -> Any:
        fprop_is_high, _, wgrad_is_high = state.recipe.override_linear_precision
        blocks.check_device(x.device)
        kernel, kept = _kernel(weight, in_out), []
        out = _block_gemm(state, (LHS, x, 0), (RHS, kernel, 0), dtype, dtype if fprop_is_high else None)
        if ctx.needs_input_grad[1]:
            kept = [x.to(dtype)] if wgrad_is_high else blocks.quantized(state.recipe, LHS, x, 1)
        parts = [weight.codes, weight.scale] if is_scaled(weight) else [weight]
        ctx.save_for_backward(*parts, *kept)
        ctx.state, ctx.in_out, ctx.dtypes = state, in_out, (x.dtype, weight.dtype, dtype)
        ctx.parts = len(parts)
        return out[:, : kernel.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, in_out, (x_dtype, _, dtype) = ctx.state, ctx.in_out, ctx.dtypes
        _, *high = (dtype if is_high else None for is_high in state.recipe.override_linear_precision)
        saved = ctx.saved_tensors  # once: gradient checkpointing unpacks them
        weight, x = saved[: ctx.parts], saved[ctx.parts :]
        kernel = _kernel(ScaledTensor(*weight) if ctx.parts == 2 else weight[0], in_out)
        [grad] = grads
        dx = dweight = None
        with without_autocast(grad.device):
            state.record()
            if ctx.needs_input_grad[0]:
                dx = _block_gemm(state, (GRAD, grad, 0), (RHS, kernel, 1), dtype, high[0])
                dx = dx[:, : kernel.shape[0]].to(x_dtype)
            if ctx.needs_input_grad[1]:
                (rows, columns), lhs = kernel.shape, (LHS, x[0], 1) if high[1] else blocks.Blocks(*x)
                rhs: Any = (GRAD, grad, 1)
                if not in_out:
                    lhs, rhs, rows, columns = rhs, lhs, columns, rows
                dweight = _block_gemm(state, lhs, rhs, _wgrad_dtype(ctx), high[1])
                dweight = _weight_gradient(ctx, dweight[:rows, :columns])
        return dx, dweight, None, None, None


def _kernel(weight: Any, in_out: bool) -> torch.Tensor:
    """The weight as a matrix (k, n), in high precision."""
    weight = weight.dequantize(torch.float32) if is_scaled(weight) else weight
    return weight if in_out else weight.t()


def _block_gemm(state: ScalingState, lhs: Any, rhs: Any, dtype: torch.dtype, high: Any) -> torch.Tensor:
    """The GEMM of two operands, which are `Blocks` or the arguments of `blocks.quantized`; emulated, or of
    operands in the dtype `high`."""
    if high is not None:
        a, b = (blocks.turned(*operand).to(high) for operand in (lhs, rhs))
        return high_gemm(a, b.t(), dtype)
    key: Any = getattr(state, "key", None)
    if not isinstance(lhs, blocks.Blocks):
        lhs = blocks.quantized(state.recipe, *lhs, key=key)
    if not isinstance(rhs, blocks.Blocks):
        rhs = blocks.quantized(state.recipe, *rhs, key=key)
    return (lhs.dequantize() @ rhs.dequantize().t()).to(dtype)


def _wgrad_dtype(ctx: Any) -> torch.dtype:
    """The output dtype of the wgrad GEMM, so that the gradient is rounded once."""
    _, weight_dtype, dtype = ctx.dtypes
    return dtype if ctx.state.recipe.weight_grad == "E4M3" else weight_dtype


def _weight_gradient(ctx: Any, dweight: torch.Tensor) -> torch.Tensor:
    """The weight's gradient in the recipe's format."""
    if ctx.state.recipe.weight_grad != "E4M3":
        return dweight
    q = quantize_gradient(dweight)
    return ScaledTensor(q.codes, q.scale, ctx.dtypes[1])  # autograd expects the weight's dtype


def _quantize(state: ScalingState, operand: int, x: torch.Tensor) -> tuple[torch.Tensor, ScaledTensor]:
    """The amax of an operand, and the operand in FP8; a `ScaledTensor` in the operand's format stays."""
    format = operand_formats(state.recipe)[operand]
    if is_scaled(x) and x.codes.dtype == casts.dtype_of(format):
        return x.scale * format.max, ScaledTensor(x.codes, x.scale)  # the largest possible amax
    x = value(x)
    amax = casts.amax(x)
    return amax, quantize(x, format, state.scale_for(operand, amax, format.max))
