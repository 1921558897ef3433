"""What an FP8 layer computes, and what its gradients: an autograd function around the three GEMMs.

Input and weight are cast to FP8 once, and so is the output gradient; the backward keeps the FP8 codes.
Products accumulate in float32 and take both scales before they are cast: to the output's dtype, the
weight's gradient to its own. It leaves as E4M3 codes on a power-of-two scale where the recipe says so.
An output gradient that holds an infinity or NaN makes the other two NaN, whole: a step to be skipped.

On a GPU with FP8 tensor cores the GEMMs are `torch._scaled_mm`; elsewhere the codes are multiplied in
float32, in which each of their products is exact: the same numbers but for the order of the sums.
"""

import contextlib
import functools
import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8jax_torch import casts
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize, quantize_gradient, value
from fp8jax_torch.scaling import GRAD, LHS, RHS, ScalingState, operand_formats


def multiply(
    x: torch.Tensor, weight: torch.Tensor, state: ScalingState, *, in_out: bool, dtype: torch.dtype
) -> torch.Tensor:
    """`x @ weight` in FP8 as the recipe of `state` says.

    Args:
        x: floating, shape=(..., k).
        weight: `ScaledTensor` or floating tensor, shape=(n, k), or (k, n) if `in_out`.
        state: of this layer.
        in_out: see `weight`; transformers' Conv1D has it so.
        dtype: of the output.

    Returns:
        shape=(..., n). Its gradients: for `x` in its dtype, for `weight` in its own or as an E4M3
        `ScaledTensor`.
    """
    with without_autocast(x.device):
        matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 says nothing where there is a 0
        out: Any = _Product.apply(matrix, weight, state, in_out, dtype)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def without_autocast(device: torch.device) -> Any:
    """A context in which torch computes in the dtypes that it is given."""
    if not torch.amp.is_autocast_available(device.type):  # as on "meta"
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, state: ScalingState, in_out: bool, dtype: Any) -> Any:
        fprop_is_high, dgrad_is_high, wgrad_is_high = state.recipe.override_linear_precision
        x_seen, q_x = _quantize(state, LHS, x)
        weight_seen, q_weight = _quantize(state, RHS, weight)
        wide_x, wide_weight = (
            value(tensor).to(dtype) if is_needed else None
            for tensor, is_needed in (
                (x, fprop_is_high or wgrad_is_high),
                (weight, fprop_is_high or dgrad_is_high),
            )
        )
        lhs, rhs = (wide_x, wide_weight) if fprop_is_high else (q_x, q_weight)
        out = _gemm(lhs, rhs if in_out else _transposed(rhs), dtype, fast=True)
        kept = [wide_x if wgrad_is_high else q_x, wide_weight if dgrad_is_high else q_weight]
        ctx.is_codes = [is_scaled(tensor) for tensor in kept]
        parts = [part for tensor in kept for part in _parts(tensor)]
        ctx.save_for_backward(x_seen, weight_seen, *parts)
        ctx.state, ctx.in_out, ctx.dtypes = state, in_out, (x.dtype, weight.dtype, dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, in_out, (x_dtype, weight_dtype, dtype) = ctx.state, ctx.in_out, ctx.dtypes
        x_seen, weight_seen, *parts = ctx.saved_tensors
        rest = iter(parts)
        x, weight = (ScaledTensor(next(rest), next(rest)) if codes else next(rest) for codes in ctx.is_codes)
        _, dgrad_is_high, wgrad_is_high = state.recipe.override_linear_precision
        with without_autocast(grads[0].device):
            (grad,) = grads
            grad_seen, q_grad = _quantize(state, GRAD, grad)
            # Saturated, an infinite gradient would look like a large one: then the products are NaN.
            scale = torch.where(grad_seen < math.inf, q_grad.scale, math.nan)
            q_grad = ScaledTensor(q_grad.codes, scale)
            state.see([x_seen, weight_seen, grad_seen])
            dx = dweight = None
            if ctx.needs_input_grad[0]:
                rhs = _transposed(weight) if in_out else weight
                dx = _gemm(grad.to(dtype) if dgrad_is_high else q_grad, rhs, dtype, fast=False).to(x_dtype)
            if ctx.needs_input_grad[1]:
                grad = grad.to(dtype) if wgrad_is_high else q_grad
                lhs, rhs = (x, grad) if in_out else (grad, x)
                is_codes = state.recipe.weight_grad == "E4M3"
                dweight = _gemm(_transposed(lhs), rhs, dtype if is_codes else weight_dtype, fast=False)
                if is_codes:  # autograd wants the weight's dtype on them
                    q = quantize_gradient(dweight)
                    dweight = ScaledTensor(q.codes, q.scale, weight_dtype)
        return dx, dweight, None, None, None


def _quantize(state: ScalingState, operand: int, x: Any) -> tuple[torch.Tensor, ScaledTensor]:
    """The amax of `x`, and `x` in FP8 on the scale that its scaling chooses; or as it is, if it is FP8."""
    format = operand_formats(state.recipe)[operand]
    if is_scaled(x) and x.codes.dtype == casts.dtype_of(format):
        return x.scale * format.max, ScaledTensor(x.codes, x.scale)  # the largest that it could be
    x = value(x)
    seen = casts.amax(x)
    return seen, quantize(x, format, state.scale_for(operand, seen, format.max))


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Plain tensors, as autograd saves them."""
    return [tensor.codes, tensor.scale] if is_scaled(tensor) else [tensor]


def _transposed(matrix: Any) -> Any:
    return ScaledTensor(matrix.codes.t(), matrix.scale) if is_scaled(matrix) else matrix.t()


def _gemm(lhs: Any, rhs: Any, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """lhs (m, k) @ rhs (k, n): in FP8 if they are."""
    if not is_scaled(lhs):
        return _wide_gemm(lhs, value(rhs).to(lhs.dtype), dtype)
    if has_fp8(lhs.device):
        return scaled_mm(lhs, rhs, dtype, fast=fast)
    out = casts.to_float(lhs.codes) @ casts.to_float(rhs.codes)
    # Two multiplications: the product of the scales alone can leave float32's range.
    return (out * lhs.scale * rhs.scale).to(dtype)


def _wide_gemm(lhs: torch.Tensor, rhs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """lhs (m, k) @ rhs (k, n), accumulated in float32 and cast once."""
    if lhs.dtype == dtype:
        return lhs @ rhs
    # The one wider output that torch has, and on a GPU alone.
    if lhs.is_cuda and lhs.dtype.itemsize == 2 and dtype == torch.float32:
        return torch.mm(lhs, rhs, out_dtype=dtype)
    wide = torch.promote_types(lhs.dtype, dtype)
    return (lhs.to(wide) @ rhs.to(wide)).to(dtype)


def scaled_mm(lhs: ScaledTensor, rhs: ScaledTensor, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """lhs (m, k) @ rhs (k, n) by `torch._scaled_mm`, which wants lhs by rows, rhs by columns, and both
    dims of rhs in multiples of 16 (the rows of lhs in any number)."""
    (m, k), n = lhs.shape, rhs.shape[1]
    a, b = _padded(lhs.codes, 1, 16), _padded(rhs.codes.t(), 16, 16)
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.t(), lhs.scale, rhs.scale, out_dtype=dtype, use_fast_accum=fast
    )
    return out[:m, :n] if k else out.zero_()


def _padded(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """By rows, with zeros up to multiples of `rows` and `columns`."""
    more = (-codes.shape[1] % columns, -codes.shape[0] % rows)
    if any(more):
        padded = torch.nn.functional.pad(codes.contiguous().view(torch.uint8), (0, more[0], 0, more[1]))
        return padded.view(codes.dtype)
    return codes.contiguous()


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8: a GPU of compute capability 8.9 or more."""
    return why_no_fp8(device) is None


def why_no_fp8(device: torch.device) -> str | None:
    """None if the device multiplies FP8, else the reason."""
    if device.type != "cuda":
        return f"FP8 products are emulated, exactly: the device is {device.type}"
    if torch.version.hip:
        return "FP8 products are emulated, exactly: this backend was not tried with ROCm"
    found = torch.cuda.get_device_capability(device)
    if found < (8, 9):
        capability = ".".join(map(str, found))
        return f"FP8 products are emulated, exactly: compute capability {capability}, and FP8 needs 8.9"
    return None
