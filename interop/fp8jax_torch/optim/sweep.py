"""One Adam step along one parameter, in chunks that stay in cache.

What is kept narrow is widened chunk by chunk to float32, moved, and rounded again on a fresh power-of-two
scale. The arithmetic is in the order of MS-AMP's: between E4M3 numbers ties are common, and another order
would round them otherwise. That scale needs the largest of the new values before the first is
rounded, which takes a second pass over all. On a CPU the step therefore guesses the scales, powers of
two, from those of the steps before, keeps the rounded codes aside until it knows them, and passes again
for what it guessed wrong. On a GPU it passes twice, and never waits for the device.

No float32 copy of a parameter is ever made: aside stand 5 bytes a number of one parameter at a time (O2).
"""

import math
import struct
from typing import Any, NamedTuple

import torch

from fp8jax_torch import casts

# Numbers in a chunk. On a CPU four float32 chunks fit in the second-level caches of two cores.
_CHUNK = {"cpu": 1 << 17}
_CHUNK_ELSEWHERE = 1 << 24


class Kept(NamedTuple):
    """A tensor as it is kept: codes and a scale; or plain, of any floating dtype, where scale is None."""

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
        """What moments and weight decay by."""
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        return _float32(self.betas[0]), _float32(self.betas[1]), decay


_NAMES = ("mu", "nu", "weight", "master")


class Workspace:
    """Memory that the parameters of a step use one after the other."""

    def __init__(self) -> None:
        self.kept: dict[Any, torch.Tensor] = {}

    def like(self, name: str, codes: torch.Tensor) -> torch.Tensor:
        """Uninitialized, of the shape and dtype of `codes`."""
        key, size = (name, codes.dtype, codes.device), codes.numel()
        if key not in self.kept or self.kept[key].numel() < size:
            self.kept[key] = torch.empty(size, dtype=codes.dtype, device=codes.device)
        return self.kept[key][:size].view(codes.shape)


def take_step(leaf: Leaf, numbers: Numbers, workspace: Workspace, past: list[torch.Tensor]) -> None:
    """Moves the weight, the moments and the master of one parameter, all in place.

    Args:
        leaf, numbers: see there.
        workspace: of this step.
        past: the amaxes of at most two steps before, the newest last; this step's enter. They only make
            guesses better.
    """
    narrow = [name for name in _NAMES if _has_scale(leaf, name)]
    if not narrow:
        grad, mu, nu, weight = (kept.codes for kept in (leaf.grad, leaf.mu, leaf.nu, leaf.weight))
        if grad.dtype == weight.dtype == torch.float32:
            _advance_fused(grad, mu, nu, weight, numbers)
        else:
            _sweep(leaf, numbers, {}, {}, move_plain=True)
        return
    aside = {name: workspace.like(name, getattr(leaf, name).codes) for name in narrow}
    # A weight that moves where it is kept, in float32, is lost in the first pass. What depends on it is then
    # not to be guessed: the moments with L2 decay, and narrow weights that are rounded from it.
    stays = (leaf.master or leaf.weight).scale is not None
    is_l2 = numbers.weight_decay != 0 and not numbers.decoupled
    can_repeat = stays or not (is_l2 or "weight" in narrow)
    if leaf.grad.codes.device.type == "cpu" and can_repeat and past:
        guess = scales_of(leaf, narrow, (2 * past[-1] - past[0]).clamp_(min=0))
        amaxes = _sweep(leaf, numbers, guess, aside, move_plain=True)
        scales = scales_of(leaf, narrow, amaxes)
        wrong = [name for name in narrow if scales[name] != guess[name]]
        if "master" in narrow and {"weight", "master"} & set(wrong):
            wrong = sorted({*wrong, "weight", "master"})  # the weight is rounded from the master
        if wrong:
            _sweep(leaf, numbers, scales, {name: aside[name] for name in wrong}, move_plain=False)
    else:
        amaxes = _sweep(leaf, numbers, {}, {}, move_plain=False)
        scales = scales_of(leaf, narrow, amaxes)
        _sweep(leaf, numbers, scales, aside, move_plain=True)
    past[:] = [*past[-1:], amaxes]
    for name in narrow:
        getattr(leaf, name).codes.copy_(aside[name])
        getattr(leaf, name).scale.copy_(scales[name])


def amaxes_of_step(leaf: Leaf, numbers: Numbers) -> torch.Tensor:
    """Largest magnitudes of the new moments and weight, float32, shape=(3,); nothing is changed."""
    return _sweep(leaf, numbers, {}, {}, move_plain=False)


def scales_of(leaf: Leaf, names: list[str], amaxes: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fresh scales of what is kept narrow."""
    of_name: dict[str, Any] = dict(zip(_NAMES, (*amaxes, amaxes[2]), strict=True))
    limits = [getattr(leaf, name).limit for name in names]
    seen = torch.stack([of_name[name] for name in names])
    return dict(zip(names, casts.scale_of(seen, limits, power_of_two=True), strict=True))


def _has_scale(leaf: Leaf, name: str) -> bool:
    kept = getattr(leaf, name)
    return kept is not None and kept.scale is not None


def _sweep(
    leaf: Leaf, numbers: Numbers, scales: dict[str, Any], aside: dict[str, Any], *, move_plain: bool
) -> torch.Tensor:
    """One pass. Rounds what has a place in `aside`, on its scale; moves what is plain, if `move_plain`.

    Returns the largest magnitudes of the new moments and weight, shape=(3,).
    """
    device, size = leaf.grad.codes.device, leaf.grad.codes.numel()
    chunk = min(size, _CHUNK.get(device.type, _CHUNK_ELSEWHERE))
    bits = torch.empty(chunk, dtype=torch.int16, device=device)
    # The weight moves from its most exact form.
    if leaf.mu.scale is None:
        advance, factors = _advance_fused, (1.0, 1.0, 1.0)
    else:
        advance, factors = _advance, numbers.factors
    kept_and_factors = zip((leaf.mu, leaf.nu, leaf.master or leaf.weight), factors, strict=True)
    grads = _Read(leaf.grad, 1.0, chunk, bits, in_place=True)
    read = [_Read(kept, factor, chunk, bits, in_place=move_plain) for kept, factor in kept_and_factors]
    write = [
        _Write(name, codes, scale, chunk) for name, codes, scale in _to_write(leaf, scales, aside, move_plain)
    ]
    temporaries = torch.empty(2, chunk, device=device)
    lows, highs = [], []
    for i in range(-(-size // chunk) if size else 0):
        grad, mu, nu, weight = grads.widened(i), *(reader.widened(i) for reader in read)
        advance(grad, mu, nu, weight, numbers, temporaries[:, : grad.numel()])
        moved = {"mu": mu, "nu": nu, "weight": weight, "master": weight}
        for tensor in (mu, nu, weight):
            low, high = torch.aminmax(tensor)
            lows.append(low)
            highs.append(high)
        for writer in write:
            new = writer.write(i, moved[writer.name], temporaries[0, : grad.numel()])
            if writer.name == "master":
                moved["weight"] = temporaries[1, : grad.numel()].copy_(new)
    if not lows:
        return torch.zeros(3, device=device)
    # Within one chunk as within all: NaN is larger than any.
    largest = torch.maximum(-torch.stack(lows), torch.stack(highs)).view(-1, 3).amax(0)
    return largest.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _to_write(leaf: Leaf, scales: dict[str, Any], aside: dict[str, Any], move_plain: bool) -> Any:
    """Name, destination and scale of what a pass writes: the master before the weight that comes from it."""
    for name in ("mu", "nu", "master", "weight"):
        kept = getattr(leaf, name)
        if name in aside:
            yield name, aside[name], scales[name]
        elif kept is not None and kept.scale is None and move_plain:
            # What is float32 is moved where it is, unless it comes from elsewhere.
            if kept.codes.dtype != torch.float32 or (name == "weight" and leaf.master is not None):
                yield name, kept.codes, None


class _Read:
    """Gives the parts of a kept tensor in float32, times a factor: in a buffer, or where they are kept if
    that is float32."""

    def __init__(self, kept: Kept, factor: float, chunk: int, bits: torch.Tensor, *, in_place: bool):
        codes = kept.codes.view(-1)
        self.in_place = in_place and codes.dtype == torch.float32 and kept.scale is None
        # As `casts.to_float`, without its look for NaN: a step with one is not taken.
        self.by_bits = codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu"
        # Times a power of two the factor loses nothing.
        self.scale = factor if kept.scale is None else factor * _number(kept.scale)
        if self.by_bits:
            codes = codes.view(torch.int8)
            self.scale = casts.BIAS_OF_HALF * self.scale
        self.parts, self.bits = codes.split(chunk), bits
        self.wide = None if self.in_place else torch.empty(chunk, device=codes.device)

    def widened(self, i: int) -> torch.Tensor:
        """The i-th part."""
        part = self.parts[i]
        if self.wide is None:
            return part if self.scale == 1 else part.mul_(self.scale)
        wide, bits = self.wide, self.bits
        if part.numel() != wide.numel():
            wide, bits = wide[: part.numel()], bits[: part.numel()]
        if self.by_bits:
            bits.copy_(part).bitwise_left_shift_(7).bitwise_and_(~0x4000)
            part = bits.view(torch.float16)
        wide.copy_(part)
        return wide if type(self.scale) is float and self.scale == 1 else wide.mul_(self.scale)


class _Write:
    """Rounds parts to the codes of a tensor."""

    def __init__(self, name: str, codes: torch.Tensor, scale: torch.Tensor | None, chunk: int):
        self.name, self.scale = name, None if scale is None else _number(scale)
        self.parts = codes.view(-1).split(chunk)

    def write(self, i: int, wide: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Rounds the i-th part; returns its value, of a master as it is kept."""
        if self.scale is None:
            self.parts[i].copy_(wide)
            return wide
        # Nothing is beyond the format's max on a scale that fits, and where it does not, this is repeated.
        self.parts[i].copy_(torch.mul(wide, 1 / self.scale, out=scratch))
        return scratch.copy_(self.parts[i]).mul_(self.scale) if self.name == "master" else wide


def _number(scale: torch.Tensor) -> Any:
    """On a CPU a number, which is cheaper to multiply with; a GPU is not waited for."""
    return scale.item() if scale.device.type == "cpu" else scale


def _advance(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    weight: torch.Tensor,
    numbers: Numbers,
    temporaries: torch.Tensor,
) -> None:
    """Adam's step, float32, in place; mu, nu and weight come multiplied by what they decay by."""
    (beta1, beta2), sign = numbers.betas, -1.0 if numbers.maximize else 1.0
    first, second = temporaries
    if not numbers.decoupled and numbers.weight_decay:
        grad = torch.mul(weight, numbers.weight_decay, out=second).add_(grad, alpha=sign)
        sign = 1.0
    mu.add_(torch.mul(grad, sign * _float32(1 - beta1), out=first))
    nu.addcmul_(grad, grad, value=_float32(1 - beta2))
    # lr m / c1 / (sqrt(v) / sqrt(c2) + eps), with the corrections c1 and c2 of the moments' bias.
    step = numbers.step
    root = math.sqrt(1 - beta2**step)
    # The same as `sqrt`, which on a CPU goes to a library with threads of its own, and waits for them.
    torch.pow(nu, 0.5, out=first).add_(numbers.eps * root)
    weight.addcdiv_(mu, first, value=-numbers.lr * root / (1 - beta1**step))


def _advance_fused(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    weight: torch.Tensor,
    numbers: Numbers,
    *ignored: Any,
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
