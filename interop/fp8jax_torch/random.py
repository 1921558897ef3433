"""Random bits for stochastic rounding, from a counter: those of `fp8jax.quantization`, bit for bit.

A bit depends on the seed, the step, the leaf's number and the entry's place in the leaf. Numbers of
32 bits are int32 here, whose sums and products wrap as those of uint32.
"""

import torch
from jaxtyping import Int32, Shaped

_ODD = 0x9E3779B9 - 2**32
_FACTORS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1))


def leaf_seed(seed: int, step: int, leaf: int) -> Int32[torch.Tensor, ""]:
    """The seed of the leaf number `leaf` in a step; `seed` has 64 bits, those of a key of JAX."""
    mixed = _mix(_mix(_int32(seed >> 32 ^ step)) ^ _int32(seed))
    return _mix(mixed + _int32(leaf * _ODD))


def random_bits(
    seed: Int32[torch.Tensor, ""], start: int, like: Shaped[torch.Tensor, "..."]
) -> Int32[torch.Tensor, "..."]:
    """32 random bits for each entry of `like`, a part of the tensor of the seed that begins at `start`."""
    place = torch.arange(like.numel(), dtype=torch.int32, device=like.device).add_(int(_int32(start)))
    return _mix(place.bitwise_xor_(int(seed))).view(like.shape)


def other_bits(bits: Int32[torch.Tensor, "..."]) -> tuple[Int32[torch.Tensor, "..."], ...]:
    """Two more random numbers for an entry: with other upper bits than `bits`."""
    return (bits << 16).bitwise_or_(_shifted(bits, 16)), bits * _ODD


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
