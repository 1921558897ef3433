"""Tensors from one side to the other, after `check` found that they fit.

Transposing, splitting heads, stacking layers: all of it is torch's to do, in both directions. XLA on CPU
would move float8 arrays by way of float16.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fp8jax_torch.bridge.crossing import to_jax, to_torch
from fp8jax_torch.bridge.names import Place
from fp8jax_torch.bridge.slots import Slots, codes_of
from fp8jax_torch.bridge.trees import Key, Tree, codes_and_scale, scaled
from fp8jax_torch.scaled import ScaledTensor, is_scaled


def merged(
    tensors: Mapping[str, torch.Tensor], slots: Slots, tree: Tree | None, *, share: bool
) -> dict[Key, Any]:
    """The Flax leaves that torch tensors make, on the devices of the tree's, if there is one.

    Layers that are stacked have a scale each, also where the tree has one for all of them: FP8 moments
    of what is itself not scaled.
    """
    parts: dict[Key, dict[tuple[int, ...], tuple[Any, Place]]] = {}
    for slot in slots.found:
        parts.setdefault(slot.key, {}).setdefault(slot.place.layer, (tensors[slot.name], slot.place))
    leaves = {}
    for key, by_index in parts.items():
        like = (None, None) if tree is None else codes_and_scale(tree.leaves[key])
        layers = tuple(n + 1 for n in max(by_index))
        ordered = [by_index[index] for index in sorted(by_index)]
        first = ordered[0][0]
        codes = _stacked([place.arrange(codes_of(tensor)) for tensor, place in ordered], layers)
        if not share and codes.is_contiguous() and _memory(codes) == _memory(codes_of(first)):
            codes = codes.clone()
        scale = None
        if is_scaled(first):
            scale = _stacked([tensor.scale.detach() for tensor, _ in ordered], layers).clone()
            if layers or like[1] is None or like[1].ndim:
                scale = scale.reshape(layers + (1,) * (codes.ndim - len(layers)))
            scale = to_jax(scale, _sharding(like[1]) if like[1] is not None and like[1].ndim else None)
        leaves[key] = scaled(to_jax(codes, _sharding(like[0])), scale)
    return leaves


def split(
    tensors: Mapping[str, torch.Tensor], slots: Slots, tree: Tree, *, share: bool
) -> dict[str, torch.Tensor]:
    """The torch tensors that Flax leaves make; `tensors` says of what shapes and on which devices."""
    whole: dict[Key, tuple[torch.Tensor, torch.Tensor | None]] = {}
    parts = {}
    for slot in slots.found:
        like = tensors[slot.name]
        if slot.key not in whole:
            codes, scale = codes_and_scale(tree.leaves[slot.key])
            whole[slot.key] = (
                to_torch(codes, like.device),
                None if scale is None else to_torch(scale, like.device),
            )
        codes, scale = whole[slot.key]
        part = slot.place.restore(codes[slot.place.layer], like.shape)
        part = part if share else part.clone(memory_format=torch.contiguous_format)
        if scale is not None:
            one = scale[slot.place.layer] if scale.ndim else scale
            part = ScaledTensor(part, one.reshape(()).clone(), like.dtype)
        parts[slot.name] = part
    return parts


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one form have the same codes and scales; a NaN is the same as itself."""
    pairs = [(codes_of(a), codes_of(b))]
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        pairs.append((a.scale, b.scale))
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in pairs)


def _stacked(parts: list[torch.Tensor], layers: tuple[int, ...]) -> torch.Tensor:
    """Parts in the order of their indices as one tensor."""
    return torch.stack(parts).reshape(layers + tuple(parts[0].shape)) if layers else parts[0]


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
