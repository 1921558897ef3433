"""Which torch tensor is which part of which Flax leaf.

A slot is such a pair of names. Both directions start from the names that torch has, so they pair the
same; scaling state (`fc.fp8.scale`) goes where the weight beside it (`fc.weight`) goes.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fp8jax_torch.bridge.names import NameMap, Place
from fp8jax_torch.bridge.trees import Key, Tree
from fp8jax_torch.scaled import is_scaled

# An entry of the scaling state of a module's weight.
_STATE = re.compile(r"((?:.*\.)?)fp8\.(\w+)")


class Slot(NamedTuple):
    """A torch tensor's name, and the part of a Flax leaf that is the same."""

    name: str
    key: Key
    place: Place


class Slots(NamedTuple):
    """The slots of a model's tensors, and the names that no rename fits."""

    found: list[Slot]
    unknown: list[str]


def paired(tensors: Mapping[str, torch.Tensor], mapping: NameMap, tree: Tree | None) -> Slots:
    """The slot of each torch tensor that has a place.

    Of tensors that share memory (a tied head and embedding) those whose own place is not in the tree
    have the place of the first; without a tree, all but the first.
    """
    firsts = ties(tensors)

    def place_of(name: str) -> Place | None:
        place, first = mapping.place(name), firsts.get(name)
        is_absent = place is None or tree is None or tree.weight(place.path) not in tree.leaves
        return mapping.place(first) if first is not None and is_absent else place

    layout, slots = tree or Tree({}), Slots([], [])
    for name in tensors:
        state = _STATE.fullmatch(name)
        weight = f"{state[1]}weight" if state else name
        place = place_of(weight)
        if place is None:
            if mapping.fitting(weight) is None:
                slots.unknown.append(name)
        elif state:
            key = layout.state(place.path, state[2])
            slots.found.append(Slot(name, key, Place(place.path, place.layer)))
        else:
            slots.found.append(Slot(name, layout.weight(place.path), place))
    return slots


def ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names of tensors that are one before them in memory, and that one's name."""
    first: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        codes = codes_of(tensor)
        if codes.numel() and codes.device.type != "meta":
            key = (codes.device, codes.data_ptr(), codes.shape, codes.dtype)
            if first.setdefault(key, name) != name:
                tied[name] = first[key]
    return tied


def codes_of(tensor: Any) -> torch.Tensor:
    """A `ScaledTensor`'s codes, or the plain tensor itself; detached."""
    return (tensor.codes if is_scaled(tensor) else tensor).detach()
