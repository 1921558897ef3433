"""The FP8 matmul of a layer: an autograd function around its three GEMMs.

Input, weight and output gradient are quantized for their GEMMs by the scaling of the recipe, see
`scaling.base`; an operand of a GEMM in high precision is cast to the output's dtype. The residuals are the
operands of the second GEMMs; a weight that is not quantized once for both of its GEMMs is saved as it is
stored, and quantized again for dgrad. GEMMs accumulate in float32 and multiply by the scales before they cast
to the output's dtype. The weight gradient has the weight's dtype, or is quantized to E4M3 on a power-of-two
scale where the recipe says so. An output gradient with inf or NaN makes both other gradients NaN, so that the
step is skipped.
"""

import contextlib
import math
from typing import Any

import torch
from jaxtyping import Float
from torch.autograd.function import once_differentiable

from fp8jax.scaling import GRAD, LHS, RHS
from fp8jax_torch.gemm import DGRAD, FPROP, GEMMS, WGRAD, Operand, gemm
from fp8jax_torch.scaled import ScaledTensor, is_scaled, quantize_gradient
from fp8jax_torch.scaling import ScalingState


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

    Raises:
        RuntimeError: the input is complex, or has another number of features than the weight; or torch
            traces, exports or transforms the call, or splits the weight over processes.
    """
    _check_no_transform()
    if hasattr(weight, "placements") and state.recipe.scaling != "current":  # a DTensor
        raise RuntimeError(
            f"`model`: expected scaling=current with tensor parallelism; got {state.recipe.scaling}."
        )
    if x.is_complex():
        raise RuntimeError(f"`{state.path or '(root)'}`: expected a real input; got {x.dtype}.")
    features = weight.shape[0 if in_out else 1]
    if x.shape[-1] != features:
        raise RuntimeError(  # as torch's layer does
            f"`{state.path or '(root)'}`: expected an input with {features} features; got {list(x.shape)}."
        )
    with without_autocast(x.device):
        matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is undefined with a size of 0
        out: Any = _Matmul.apply(matrix, weight, state, in_out, dtype, torch.is_grad_enabled())
        return out.reshape(*x.shape[:-1], out.shape[-1])


def _check_no_transform() -> None:
    """Raises RuntimeError where torch traces, exports or transforms the call; `torch.compile` is legal."""
    got = "torch.jit.trace" if torch.jit.is_tracing() else ""  # pyright: ignore[reportPrivateImportUsage]
    if torch.compiler.is_exporting():
        got = "torch.export"
    elif not torch.compiler.is_compiling():
        # torch has no public way to ask for its transforms; `test_transforms_of_fp8_layers_are_refused`.
        functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
        is_transformed = functorch.peek_interpreter_stack() is not None
        got = "a transform of torch.func" if is_transformed else got
    if got:
        raise RuntimeError(
            f"`model`: expected a plain call of an FP8 layer; got {got}. Take "
            "`fp8jax_torch.dequantize(model)`."
        )


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast."""
    if not torch.amp.is_autocast_available(device.type):  # as on "meta"
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, state: ScalingState, in_out: bool, dtype: Any, is_trained: bool
    ) -> Any:
        has_dgrad, has_wgrad = (is_trained and is_needed for is_needed in ctx.needs_input_grad[:2])
        stored = Operand(weight.codes, weight.scale) if is_scaled(weight) else Operand(weight)
        lhs, rhs, scaling = Operand(x), _kernel(state, stored, in_out), state.scaling
        amaxes = scaling.amax(lhs), scaling.amax(rhs)
        if is_trained and not (has_dgrad or has_wgrad):
            state.record(*amaxes, None, has_backward=False)
        lhs, for_wgrad = _operands(state, LHS, lhs, amaxes[0], (True, has_wgrad), dtype)
        has_codes = scaling.weight_dtype is not None and not state.recipe.override_linear_precision[1]
        rhs, for_dgrad = _operands(state, RHS, rhs, amaxes[1], (True, has_dgrad and has_codes), dtype)
        stored = _matrix(for_dgrad, in_out) if for_dgrad else stored
        ctx.save_for_backward(*amaxes, *(stored if has_dgrad else (None,) * 3), *(for_wgrad or ()))
        ctx.call = state, in_out, x.shape, x.dtype, weight.shape, weight.dtype, dtype
        return gemm(lhs, rhs, FPROP, (x.shape[0], weight.shape[in_out]), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, in_out, x_shape, x_dtype, weight_shape, weight_dtype, dtype = ctx.call
        x_amax, weight_amax, *residuals = ctx.saved_tensors  # once: gradient checkpointing unpacks them
        has_dgrad, has_wgrad = ctx.needs_input_grad[:2]
        [grad], dx, dweight = map(Operand, grads), None, None
        with without_autocast(grad.data.device):
            amax = state.scaling.amax(grad)
            state.record(x_amax, weight_amax, amax)
            first, second = _operands(state, GRAD, grad, amax, (has_dgrad, has_wgrad), dtype)
            if has_dgrad:
                kernel = _kernel(state, Operand(*residuals[:3]), in_out)
                _, rhs = _operands(state, RHS, kernel, None, (False, True), dtype)
                dx = gemm(first, rhs, DGRAD, x_shape, dtype).to(x_dtype)
            if has_wgrad:
                lhs, rhs, pairs = Operand(*residuals[3:]), second, WGRAD
                if not in_out:
                    lhs, rhs, pairs = rhs, lhs, WGRAD[::-1]
                is_fp8 = state.recipe.weight_grad == "E4M3"
                # In the weight's dtype, so that a gradient in high precision is rounded once.
                dweight = gemm(lhs, rhs, pairs, weight_shape, dtype if is_fp8 else weight_dtype)
                if is_fp8:
                    q = quantize_gradient(dweight)
                    dweight = ScaledTensor(q.codes, q.scale, weight_dtype)  # autograd expects this dtype
        return dx, dweight, None, None, None, None


def _kernel(state: ScalingState, stored: Operand, in_out: bool) -> Operand:
    """A weight as the matrix (k, n), in high precision or in the scaling's `weight_dtype`."""
    if stored.scale is not None and stored.data.dtype != state.scaling.weight_dtype:
        stored = Operand(stored.dequantize())
    return _matrix(stored, in_out)


def _matrix(stored: Operand, in_out: bool) -> Operand:
    """A weight as it is stored as the matrix (k, n), and the inverse."""
    return stored if in_out else stored._replace(data=stored.data.t())


def _operands(
    state: ScalingState, operand: int, x: Operand, amax: Any, uses: tuple[bool, bool], dtype: torch.dtype
) -> list[Any]:
    """An operand for each of its two GEMMs, quantized or in `dtype`; None for a GEMM that is not used."""
    flags = zip(GEMMS, state.recipe.override_linear_precision, strict=True)
    high = {pair for pairs, is_high in flags if is_high for pair in pairs}
    is_high = [is_used and (operand, use) in high for use, is_used in enumerate(uses)]
    copies = state.scaling.quantize(state, operand, x, amax, [uses[i] and not is_high[i] for i in (0, 1)])
    matrix = Operand(x.dequantize().to(dtype)) if any(is_high) else None
    return [matrix if is_high[use] else copies[use] for use in (0, 1)]
