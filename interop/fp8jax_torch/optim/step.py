"""One Adam step for one parameter, in float32.

Quantized tensors are dequantized to float32, updated, and quantized on new power-of-two scales. The order of
the operations is MS-AMP's: ties are common between E4M3 numbers, and another order would round them
otherwise. A step needs float32 memory for one parameter at a time.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from fp8jax_torch import casts
from fp8jax_torch.scaled import is_scaled


class ParamState(NamedTuple):
    """The tensors that a step reads and writes for one parameter: plain, or `ScaledTensor`s; contiguous."""

    grad: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    weight: torch.Tensor
    master: torch.Tensor | None


class AdamScalars(NamedTuple):
    """Hyperparameters of one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    step: int  # 1 for the first

    @property
    def decays(self) -> tuple[float, float, float]:
        """The decay rates of the first and second moment and the weight."""
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        return _float32(self.betas[0]), _float32(self.betas[1]), decay


def take_step(state: ParamState, scalars: AdamScalars) -> None:
    """Updates the weight, the moments and the master weight of one parameter in place."""
    in_place = state[:4]
    if not any(map(is_scaled, in_place)) and all(x.dtype == torch.float32 for x in in_place):
        _advance_fused(*in_place, scalars)
        return
    mu, nu, weight = _advanced(state, scalars)
    _write(state.mu, mu)
    _write(state.nu, nu)
    amax = casts.amax(weight)
    if state.master is not None:
        # The weight is rounded from the stored master weight, on the scale of the exact weight.
        _write(state.master, weight)
        weight = _dequantized(state.master)
    _write(state.weight, weight, amax)


def amaxes_of_step(state: ParamState, scalars: AdamScalars) -> Float[torch.Tensor, "3"]:
    """The amaxes of the new moments and weight, float32, inf for NaN; writes nothing."""
    return torch.stack([casts.amax(tensor) for tensor in _advanced(state, scalars)])


def _advanced(state: ParamState, scalars: AdamScalars) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new first and second moment and weight, float32."""
    # The weight moves from its most exact form.
    stored = (state.mu, state.nu, state.weight if state.master is None else state.master)
    is_fused = not is_scaled(state.mu)
    decays = (1.0, 1.0, 1.0) if is_fused else scalars.decays
    mu, nu, weight = (_dequantized(x, decay) for x, decay in zip(stored, decays, strict=True))
    (_advance_fused if is_fused else _advance)(_dequantized(state.grad), mu, nu, weight, scalars)
    return mu, nu, weight


def _dequantized(x: torch.Tensor, factor: Any = 1.0) -> torch.Tensor:
    """The value times a factor, float32, in new memory."""
    # A scale that is a power of two does not round the factor.
    codes, factor = (x.codes, x.scale * factor) if is_scaled(x) else (x, factor)
    wide = casts.to_float(codes)
    return wide * factor if wide is codes else wide.mul_(factor)


def _write(x: torch.Tensor, new: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    """Writes a float32 tensor to `x`; quantizes it on the scale of `amax`, by default its own."""
    if not is_scaled(x):
        x.copy_(new)
        return
    format = casts.format_of(x.codes.dtype)
    scale = casts.scale_of(casts.amax(new) if amax is None else amax, format.max, power_of_two=True)
    x.codes.copy_(casts.cast(new * (1 / scale), format))
    x.scale.copy_(scale)


def _advance(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, weight: torch.Tensor, scalars: AdamScalars
) -> None:
    """Adam's step, float32, in place; mu, nu and weight are already multiplied by their decay rates."""
    (beta1, beta2), sign = scalars.betas, -1.0 if scalars.maximize else 1.0
    if not scalars.decoupled and scalars.weight_decay:
        grad = torch.mul(weight, scalars.weight_decay).add_(grad, alpha=sign)
        sign = 1.0
    mu.add_(torch.mul(grad, sign * _float32(1 - beta1)))
    nu.addcmul_(grad, grad, value=_float32(1 - beta2))
    # lr m / c1 / (sqrt(v) / sqrt(c2) + eps), with the bias corrections c1 and c2.
    root = math.sqrt(1 - beta2**scalars.step)
    # As `sqrt`, which on a CPU waits for the threads of a library.
    denominator = torch.pow(nu, 0.5).add_(scalars.eps * root)
    weight.addcdiv_(mu, denominator, value=-scalars.lr * root / (1 - beta1**scalars.step))


def _advance_fused(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, weight: torch.Tensor, scalars: AdamScalars
) -> None:
    """`_advance` by torch's fused Adam, with other last bits: for first moments that are not E4M3."""
    kernels: Any = torch.ops.aten
    fused = kernels._fused_adamw_ if scalars.decoupled else kernels._fused_adam_
    step = torch.tensor(float(scalars.step), device=weight.device)
    tensors = ([weight], [grad], [mu], [nu], [], [step])
    fused(
        *tensors,
        lr=scalars.lr,
        beta1=scalars.betas[0],
        beta2=scalars.betas[1],
        weight_decay=scalars.weight_decay,
        eps=scalars.eps,
        amsgrad=False,
        maximize=scalars.maximize,
    )


def _float32(number: float) -> float:
    """Rounds to float32, as JAX and MS-AMP do."""
    return float(np.float32(number))
