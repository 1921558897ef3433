"""One Adam step for one parameter, in float32.

Quantized tensors are dequantized to float32, updated, and quantized on new power-of-two scales. The order of
the operations is MS-AMP's: ties are common between E4M3 numbers, and another order would round them
otherwise. A step needs float32 memory for one parameter at a time; it rounds a part of it at a time.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from fp8jax import formats
from fp8jax_torch import casts
from fp8jax_torch.random import leaf_seed, other_bits, random_bits
from fp8jax_torch.scaled import ScaledTensor, is_scaled

TO_NEAREST = ("nearest", "nearest", "value")

# Of the weight's scale; as in `fp8jax.optim`.
REMAINDER_STEP = 1 / 16

# Entries that are rounded at once: a CPU's cache holds them, and a GPU is busy with them.
_PART = {"cpu": 2**18, "cuda": 2**24}


# Two moments and a weight.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ParamState(NamedTuple):
    """The tensors that a step reads and writes for one parameter: plain, or `ScaledTensor`s; contiguous."""

    grad: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    weight: torch.Tensor
    master: torch.Tensor | None
    remainder: torch.Tensor | None  # what rounding took from the weight, or from the master weight


class AdamScalars(NamedTuple):
    """Hyperparameters of one step."""

    lr: float
    eps: float
    weight_decay: float
    betas: tuple[float, float]
    maximize: bool
    seed: int
    decoupled: bool
    rounding: tuple[str, str, str]  # the recipe's
    leaf: int  # the parameter's number
    step: int  # 1 for the first


def take_step(state: ParamState, scalars: AdamScalars) -> None:
    """Updates the weight, the moments and the master weight of one parameter in place."""
    in_place = state[:4]
    if not any(map(is_scaled, in_place)) and all(x.dtype == torch.float32 for x in in_place):
        _advance_fused(*in_place, scalars)
        return
    parts = _parts_of(state)
    new = [_advanced(part, scalars) for part in parts]
    amaxes = _amaxes(new)[[0, 1, 2, 2]]
    for stored, amax in zip((state.mu, state.nu, state.weight, state.master), amaxes, strict=True):
        if is_scaled(stored):
            limit = casts.format_of(stored.codes.dtype).max
            stored.scale.copy_(casts.scale_of(amax, limit, power_of_two=True))
    is_random, start = scalars.rounding != TO_NEAREST, 0
    seed = leaf_seed(scalars.seed, scalars.step, scalars.leaf) if is_random else None
    for part, tensors in zip(parts, new, strict=True):
        bits = None if seed is None else random_bits(seed, start, tensors[0])
        random = (None,) * 3 if bits is None else (bits, *other_bits(bits))
        _write(part, tensors, random, scalars.rounding)
        start += tensors[0].numel()


def amaxes_of_step(state: ParamState, scalars: AdamScalars) -> Float[torch.Tensor, "3"]:
    """The amaxes of the new moments and weight, float32, inf for NaN; writes nothing."""
    return _amaxes([_advanced(part, scalars) for part in _parts_of(state)])


def _amaxes(parts: list[Tensors]) -> Float[torch.Tensor, "3"]:
    return torch.stack([torch.stack([casts.amax(x) for x in tensors]) for tensors in parts]).amax(0)


def _parts_of(state: ParamState) -> list[ParamState]:
    """The state in parts of its flat tensors, so that temporary tensors are small."""
    size, longest = state.grad.numel(), _PART.get(state.grad.device.type, 2**24)
    if size <= longest:
        return [state]

    def split(x: Any) -> Any:
        codes = (x.codes if is_scaled(x) else x).view(-1).split(longest)
        return [ScaledTensor(part, x.scale) for part in codes] if is_scaled(x) else codes

    nothing = [None] * -(-size // longest)
    return [
        ParamState(*part) for part in zip(*(nothing if x is None else split(x) for x in state), strict=True)
    ]


def _advanced(state: ParamState, scalars: AdamScalars) -> Tensors:
    """The new first and second moment, or the root of the second, and the new weight, float32."""
    # The weight moves from its most exact form.
    stored = (state.mu, state.nu, state.weight if state.master is None else state.master)
    if scalars.rounding != TO_NEAREST:
        mu, nu, weight = map(_dequantized, stored, (1.0,) * 3, (None, None, state.remainder))
        return _advance_as_jax(_dequantized(state.grad), mu, nu, weight, scalars)
    is_fused = not is_scaled(state.mu)
    decays = (1.0, 1.0, 1.0)
    if not is_fused:
        decay = 1 - scalars.lr * scalars.weight_decay if scalars.decoupled else 1.0
        decays = (*map(_float32, scalars.betas), decay)
    mu, nu, weight = (_dequantized(x, decay) for x, decay in zip(stored, decays, strict=True))
    (_advance_fused if is_fused else _advance)(_dequantized(state.grad), mu, nu, weight, scalars)
    return mu, nu, weight


def _dequantized(x: torch.Tensor, factor: Any = 1.0, remainder: Any = None) -> torch.Tensor:
    """The value, of a weight with its remainder, times a factor, float32, in new memory."""
    # A scale that is a power of two does not round the factor.
    codes, factor = (x.codes, x.scale * factor) if is_scaled(x) else (x, factor)
    values = casts.to_float(codes)
    if remainder is not None and not is_scaled(x):
        values = values + remainder * _fraction(values, x.dtype)
    elif remainder is not None:
        values.add_(casts.to_float(remainder), alpha=REMAINDER_STEP)
    return values * factor if values is codes else values.mul_(factor)


def _write(state: ParamState, new: Tensors, random: tuple[Any, ...], rounding: tuple[str, str, str]) -> None:
    """Writes the new moments and weight to a state, on its scales."""
    (mu, nu, weight), (of_mu, of_weight, of_nu) = new, rounding
    _encode(state.mu, mu, random[0] if of_mu == "stochastic" else None)
    _encode(state.nu, nu, random[2] if of_nu == "root" else None)
    exact: Any = state.weight if state.master is None else state.master
    if is_16_bits(exact) and of_weight != "nearest":
        _write_16_bits(exact, state.remainder, weight, random[1], of_weight)
        return
    scaled = _encode(exact, weight, random[1] if of_weight == "stochastic" else None)
    if state.remainder is not None:
        rest = scaled.sub_(casts.to_float(exact.codes)).div_(REMAINDER_STEP)
        state.remainder.copy_(casts.cast_stochastically(rest, formats.E4M3, random[1]))
    if state.master is not None:  # the weight is rounded from the stored master weight
        _encode(state.weight, _dequantized(state.master))


def is_16_bits(x: torch.Tensor) -> bool:
    """Whether a weight is a plain bfloat16 or float16 tensor."""
    return not is_scaled(x) and x.dtype in (torch.bfloat16, torch.float16)


def _write_16_bits(
    stored: torch.Tensor, remainder: Any, new: torch.Tensor, random: Any, rounding: str
) -> None:
    """Writes a plain weight, and what rounding took from it; see `encode_plain` in fp8jax."""
    format, old = casts.format_of(stored.dtype), stored.float()
    if rounding == "stochastic":
        rounded = casts.cast_stochastically(new, format, random).float()
    else:
        rounded = new.clamp(-format.max, format.max).to(stored.dtype).float()
    stored.copy_(old + (rounded - old))
    if remainder is not None:
        rounded = stored.float()
        uniform = (random >> 8).bitwise_and_(2**24 - 1) * 2.0**-24
        codes = ((new - rounded) / _fraction(rounded, stored.dtype)).add_(uniform).floor_()
        remainder.copy_(codes.clamp_(-128, 127))


def _fraction(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A 256th of the last bit of each weight, float32."""
    format = casts.format_of(dtype)
    bits = weight.abs().clamp_(min=max(format.smallest_normal, 2.0**-100)).view(torch.int32)
    return bits.bitwise_and_(0x7F800000).view(torch.float32) * 2.0 ** (-format.mantissa_bits - 8)


def _encode(x: torch.Tensor, new: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Writes a float32 tensor to `x`; returns what is rounded: the tensor by the scale of `x`."""
    if not is_scaled(x):
        return x.copy_(new)
    scaled, format = new * (1 / x.scale), casts.format_of(x.codes.dtype)
    cast = casts.cast(scaled, format) if random is None else casts.cast_stochastically(scaled, format, random)
    x.codes.copy_(cast)
    return scaled


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


def _advance_as_jax(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, weight: torch.Tensor, scalars: AdamScalars
) -> Tensors:
    """`_advanced`, rounded as XLA on a CPU compiles `fp8jax.optim`; writes all tensors.

    A remainder holds last bits of a weight, and other roundings would change them. XLA divides by two numbers
    as by their product, and fuses multiply-adds, which torch does in `add` with alpha.
    """
    (beta1, beta2), decay = map(_float32, scalars.betas), scalars.weight_decay
    of_mu, of_nu = (_float32(1 - _float32(beta**scalars.step)) for beta in (beta1, beta2))
    is_root = scalars.rounding[2] == "root"
    if scalars.maximize:
        grad.neg_()
    if not scalars.decoupled:
        grad.add_(weight * decay)
    mu.mul_(beta1).add_(grad, alpha=_float32(1 - scalars.betas[0]))
    nu = nu.square_() if is_root else nu
    nu = grad.square_().mul_(_float32(1 - scalars.betas[1])).add_(nu, alpha=beta2)
    root = torch.pow(nu, 0.5)
    # torch's root on a CPU is not always the nearest number; a step of Newton's method is.
    root.add_(torch.addcmul(nu, root, root, value=-1).div_(root + 2.0**-100), alpha=0.5)
    update = mu / (root / _float32(math.sqrt(of_nu))).add_(scalars.eps).mul_(of_mu)
    if scalars.decoupled:
        weight.add_(update.add_(weight, alpha=decay), alpha=-scalars.lr)
    else:
        weight.sub_(update.mul_(scalars.lr))
    return mu, root if is_root else nu, weight


def _advance_fused(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, weight: torch.Tensor, scalars: AdamScalars
) -> None:
    """`_advance` by torch's fused Adam, with other last bits: for first moments that are not E4M3."""
    kernels: Any = torch.ops.aten
    fused = kernels._fused_adamw_ if scalars.decoupled else kernels._fused_adam_
    step = torch.tensor(scalars.step, dtype=torch.float32, device=weight.device)
    options = {name: getattr(scalars, name) for name in ("lr", "weight_decay", "eps", "maximize")}
    options |= {"beta1": scalars.betas[0], "beta2": scalars.betas[1], "amsgrad": False}
    fused([weight], [grad], [mu], [nu], [], [step], **options)
    torch.autograd.graph.increment_version(weight)  # which the kernel does not


def _float32(number: float) -> float:
    """Rounds to float32, as JAX and MS-AMP do."""
    return float(np.float32(number))
