"""Random bits for stochastic rounding, from a counter: those of `fp8jax.optim`, bit for bit.

A bit depends on the seed, the step, the parameter's number and the entry's place in the parameter. Numbers of
32 bits are int32 here, whose sums and products wrap as those of uint32.
"""

import torch
from jaxtyping import Int32, Shaped

_ODD = 0x9E3779B9 - 2**32
_FACTORS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1))


def leaf_seed(seed: int, step: int, leaf: int) -> Int32[torch.Tensor, ""]:
    """The seed of the parameter number `leaf` in a step; the optimizer's seed has 64 bits, as JAX's key."""
    mixed = _mix(_mix(_int32(seed >> 32 ^ step)) ^ _int32(seed))
    return _mix(mixed + _int32(leaf * _ODD))


def random_bits(
    seed: Int32[torch.Tensor, ""], start: int, like: Shaped[torch.Tensor, "..."]
) -> tuple[Int32[torch.Tensor, "..."], ...]:
    """Three numbers of 32 random bits for each entry: for the first moment, the weight, the second moment.

    `like` is a part of a parameter, which has the seed; it begins at the place `start`.
    """
    place = torch.arange(like.numel(), dtype=torch.int32, device=like.device).add_(int(_int32(start)))
    bits = _mix(place.bitwise_xor_(int(seed))).view(like.shape)
    return bits, (bits << 16).bitwise_or_(_shifted(bits, 16)), bits * _ODD


def _int32(number: int) -> Int32[torch.Tensor, ""]:
    """The lower 32 bits of a number."""
    return torch.tensor((number + 2**31) % 2**32 - 2**31, dtype=torch.int32)


def _mix(x: Int32[torch.Tensor, "..."]) -> Int32[torch.Tensor, "..."]:
    """Mixes 32 bits, in place: Chris Wellons' hash "lowbias32"."""
    for shift, factor in _FACTORS:
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x


def _shifted(x: Int32[torch.Tensor, "..."], shift: int) -> Int32[torch.Tensor, "..."]:
    """`x >> shift` of numbers without a sign."""
    return (x >> shift).bitwise_and_(2 ** (32 - shift) - 1)
