"""One Adam step of one parameter, in float32.

Quantized tensors are widened to float32, moved, and rounded on fresh power-of-two scales. The arithmetic has
MS-AMP's order: ties are common between E4M3 numbers, and another order would round them otherwise. A step
needs memory for the float32 tensors of one parameter at a time.
"""

import math
import struct
from typing import Any, NamedTuple

import torch

from fp8jax_torch import casts


class Kept(NamedTuple):
    """A stored tensor: codes and a scale; or plain, of any floating dtype, where scale is None."""

    codes: torch.Tensor  # contiguous
    scale: torch.Tensor | None  # shape=(), float32

    @property
    def limit(self) -> float:
        """The max of the format."""
        return casts.format_of(self.codes.dtype).max


class Leaf(NamedTuple):
    """What a step reads and writes of one parameter."""

    grad: Kept
    mu: Kept
    nu: Kept
    weight: Kept
    master: Kept | None


class Numbers(NamedTuple):
    """Hyperparameters of one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    step: int  # 1 for the first

    @property
    def factors(self) -> tuple[float, float, float]:
        """The decay rates of the moments and the weight."""
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        return _float32(self.betas[0]), _float32(self.betas[1]), decay


def take_step(leaf: Leaf, numbers: Numbers) -> None:
    """Moves the weight, the moments and the master of one parameter, all in place."""
    plain = [kept.codes for kept in (leaf.grad, leaf.mu, leaf.nu, leaf.weight) if kept.scale is None]
    if len(plain) == 4 and all(codes.dtype == torch.float32 for codes in plain):
        grad, mu, nu, weight = plain
        _advance_fused(grad, mu, nu, weight, numbers)
        return
    mu, nu, weight = _moved(leaf, numbers)
    _write(leaf.mu, mu)
    _write(leaf.nu, nu)
    seen = casts.amax(weight)
    if leaf.master is not None:
        # The weight is rounded from the master as it is stored, on the scale of the exact weight.
        _write(leaf.master, weight)
        weight = _widened(leaf.master)
    _write(leaf.weight, weight, seen)


def amaxes_of_step(leaf: Leaf, numbers: Numbers) -> torch.Tensor:
    """Largest magnitudes of the new moments and weight, float32, shape=(3,), inf for NaN. Changes nothing."""
    return torch.stack([casts.amax(tensor) for tensor in _moved(leaf, numbers)])


def _moved(leaf: Leaf, numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new first and second moment and weight, float32."""
    # The weight moves from its most exact form.
    stored = (leaf.mu, leaf.nu, leaf.master or leaf.weight)
    is_fused = leaf.mu.scale is None
    factors = (1.0, 1.0, 1.0) if is_fused else numbers.factors
    mu, nu, weight = (_widened(kept, factor) for kept, factor in zip(stored, factors, strict=True))
    (_advance_fused if is_fused else _advance)(_widened(leaf.grad), mu, nu, weight, numbers)
    return mu, nu, weight


def _widened(kept: Kept, factor: float = 1.0) -> torch.Tensor:
    """The value times a factor, float32, new memory."""
    wide = casts.to_float(kept.codes)
    wide = wide.clone() if wide is kept.codes else wide
    # Times a power of two the factor loses nothing.
    return wide.mul_(factor if kept.scale is None else kept.scale * factor)


def _write(kept: Kept, wide: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    """Rounds a float32 tensor to where it is stored, on the scale of an amax, by default its own."""
    if kept.scale is None:
        kept.codes.copy_(wide)
        return
    scale = casts.scale_of(casts.amax(wide) if amax is None else amax, kept.limit, power_of_two=True)
    kept.codes.copy_(casts.cast(wide * (1 / scale), casts.format_of(kept.codes.dtype)))
    kept.scale.copy_(scale)


def _advance(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    weight: torch.Tensor,
    numbers: Numbers,
) -> None:
    """Adam's step, float32, in place; mu, nu and weight are already multiplied by their decay rates."""
    (beta1, beta2), sign = numbers.betas, -1.0 if numbers.maximize else 1.0
    if not numbers.decoupled and numbers.weight_decay:
        grad = torch.mul(weight, numbers.weight_decay).add_(grad, alpha=sign)
        sign = 1.0
    mu.add_(torch.mul(grad, sign * _float32(1 - beta1)))
    nu.addcmul_(grad, grad, value=_float32(1 - beta2))
    # lr m / c1 / (sqrt(v) / sqrt(c2) + eps), with the corrections c1 and c2 of the moments' bias.
    step = numbers.step
    root = math.sqrt(1 - beta2**step)
    # The same as `sqrt`, which on a CPU goes to a library with threads of its own, and waits for them.
    denominator = torch.pow(nu, 0.5).add_(numbers.eps * root)
    weight.addcdiv_(mu, denominator, value=-numbers.lr * root / (1 - beta1**step))


def _advance_fused(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    weight: torch.Tensor,
    numbers: Numbers,
) -> None:
    """The same by torch's fused Adam, whose last bits differ: where no first moment is rounded to E4M3."""
    kernels: Any = torch.ops.aten
    fused = kernels._fused_adamw_ if numbers.decoupled else kernels._fused_adam_
    fused(
        [weight],
        [grad],
        [mu],
        [nu],
        [],
        [torch.tensor(float(numbers.step), device=weight.device)],
        lr=numbers.lr,
        beta1=numbers.betas[0],
        beta2=numbers.betas[1],
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=numbers.maximize,
    )


def _float32(number: float) -> float:
    """As JAX and MS-AMP round it."""
    return struct.unpack("f", struct.pack("f", number))[0]
