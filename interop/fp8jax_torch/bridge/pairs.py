"""Pairs of torch tensors and parts of Flax leaves, checked on both sides.

Both directions start from torch's names, so they find the same pairs. Scaling state (`fc.fp8.scale`) follows
the weight beside it (`fc.weight`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fp8jax.checkpoints import NameMap, Place
from fp8jax.checkpoints.tree import Key, Tree, codes_and_scale
from fp8jax_torch.bridge.arrays import codes_of, dtype_name
from fp8jax_torch.scaled import is_scaled

# An entry of the scaling state of a module's weight.
_STATE = re.compile(r"((?:.*\.)?)fp8\.(\w+)")

_KINDS = ("only in torch", "only in Flax", "different", "no rename fits")
_SHOWN = 8  # lines of one kind in an error

_ADVICE = (
    "Build both models of one size and transform both by one recipe. `mapping` says which tensor is where; "
    "see `NameMap.moved` and `NameMap.stacked`. `Rename` with flax=None leaves a tensor out.\n"
)


class Pair(NamedTuple):
    """A torch tensor's name, its Flax leaf, and its place in that leaf."""

    name: str
    key: Key
    place: Place


def paired(
    argument: str, tensors: Mapping[str, torch.Tensor], mapping: NameMap, tree: Tree | None
) -> list[Pair]:
    """Pairs each torch tensor with its part of a Flax leaf; without a tree only compares the tensors.

    Raises:
        ValueError: of `argument`, the caller's: a tensor or leaf has no partner, or a partner of another
            shape or format; one error lists all.
    """
    pairs, unknown = _pairs(tensors, mapping, tree)
    different: list[str] = []
    first: dict[str, Pair] = {}
    for pair in pairs:
        path = _path(pair.key, pair.place.layer)
        other = first.setdefault(path, pair)
        if other != pair and not ties({"one": tensors[other.name], "other": tensors[pair.name]}):
            different.append(f"{other.name} and {pair.name} are both {path}")
    in_flax = _forms_in_flax(tree, pairs)
    for path, pair in first.items():
        form = _form_of(tensors[pair.name], pair.place)
        found = in_flax.get(path, form)
        if found and found != form:
            different.append(f"torch's {pair.name} would be {path}, {form}; Flax has {found}")
    in_torch = [f"{first[path].name}, which would be {path}" for path in first if path not in in_flax]
    only_flax = [f"{path}, {form or 'a layer'}" for path, form in in_flax.items() if path not in first]
    lists = (in_torch, only_flax, different, unknown)
    if any(lists):
        start = f"`{argument}`: expected a partner on the other side for each tensor; got\n"
        raise ValueError(start + "".join(map(_listed, _KINDS, lists)) + _ADVICE)
    return pairs


def _pairs(
    tensors: Mapping[str, torch.Tensor], mapping: NameMap, tree: Tree | None
) -> tuple[list[Pair], list[str]]:
    """The pairs, unchecked, and the names that no rename matches."""
    # A tensor tied to an earlier tensor (a head to an embedding) gets the earlier tensor's place if there is
    # no tree with the tensor's place.
    earlier, names = ties(tensors), tree or Tree({})

    def place_of(name: str) -> Place | None:
        place = mapping.place(name)
        is_absent = place is None or tree is None or tree.weight(place.path) not in tree.leaves
        return mapping.place(earlier[name]) if name in earlier and is_absent else place

    pairs, unknown = [], []
    for name in tensors:
        state = _STATE.fullmatch(name)
        weight = f"{state[1]}weight" if state else name
        place = place_of(weight)
        if place is None:
            if mapping.rename_of(weight) is None:
                unknown.append(name)
        elif state:
            pairs.append(Pair(name, names.state(place.path, state[2]), Place(place.path, place.layer)))
        else:
            pairs.append(Pair(name, names.weight(place.path), place))
    return pairs, unknown


def ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each tensor that shares its memory with an earlier tensor, the earlier tensor's name."""
    first: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        codes = codes_of(tensor)
        if codes.numel() and codes.device.type != "meta":
            key = (codes.device, codes.data_ptr(), codes.shape, codes.dtype)
            if first.setdefault(key, name) != name:
                tied[name] = first[key]
    return tied


def _form_of(tensor: torch.Tensor, place: Place) -> str:
    """The form of a torch tensor in Flax's order."""
    try:
        shape = place.arrange(torch.empty(tensor.shape, device="meta")).shape
    except RuntimeError:
        return f"but shape {list(tensor.shape)} does not take axes={place.axes}, shape={place.shape}"
    return _form(codes_of(tensor), shape, is_scaled(tensor))


def _forms_in_flax(tree: Tree | None, pairs: Sequence[Pair]) -> dict[str, str]:
    """The form of each layer of each Flax leaf, by path; without a tree "" for each layer up to the last."""
    layers_of: dict[Key, list[tuple[int, ...]]] = {}
    for pair in pairs:
        layers_of.setdefault(pair.key, []).append(pair.place.layer)
    forms = {}
    for key in layers_of if tree is None else filter(tree.is_torchs, tree.leaves):
        if tree is None:
            stack, form = tuple(int(n) + 1 for n in np.max(layers_of[key], axis=0)), ""
        else:
            codes, scale = codes_and_scale(tree.leaves[key])
            depth = len(layers_of.get(key, [()])[0])
            stack, shape = tuple(codes.shape[:depth]), codes.shape[depth:]
            form = _form(codes, shape, scale is not None)
            if scale is not None and tuple(scale.shape) not in ((), stack + (1,) * len(shape)):
                form = f"scales of shape {list(scale.shape)}, and a torch tensor has one"
        forms |= {_path(key, index): form for index in np.ndindex(*stack)}
    return forms


def _form(codes: Any, shape: Sequence[int], is_scaled: bool) -> str:
    return f"{dtype_name(codes)}{list(shape)}{' codes on a scale' if is_scaled else ''}"


def _path(key: Key, layer: tuple[int, ...]) -> str:
    return "/".join(key) + "".join(f"[{i}]" for i in layer)


def _listed(kind: str, lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"  {kind}: {line}\n" for line in lines[:_SHOWN] + more)
