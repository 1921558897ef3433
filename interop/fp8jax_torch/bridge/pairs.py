"""Pairs of torch tensors and parts of Flax leaves, checked on both sides.

Both directions start from torch's names, so they find the same pairs. Scaling state (`fc.fp8.scale`) follows
the weight beside it (`fc.weight`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fp8jax_torch.bridge.arrays import codes_of, dtype_name
from fp8jax_torch.bridge.names import NameMap, Place
from fp8jax_torch.bridge.tree import Key, Tree, codes_and_scale
from fp8jax_torch.scaled import is_scaled

# An entry of the scaling state of a module's weight.
_STATE = re.compile(r"((?:.*\.)?)fp8\.(\w+)")

_SHOWN = 8  # lines of a kind in an error

_ADVICE = (
    "Build both models of one size and transform both by one recipe. `mapping` says which tensor is where; "
    "see `NameMap.moved`, `NameMap.stacked`, and `Rename`, whose `flax=None` leaves a tensor out.\n"
)


class Pair(NamedTuple):
    """A torch tensor's name, its Flax leaf, and its place in that leaf."""

    name: str
    key: Key
    place: Place


class _Form(NamedTuple):
    """The dtype and shape that both sides must have."""

    dtype: str
    shape: tuple[int, ...]
    is_scaled: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' codes on a scale' if self.is_scaled else ''}"


def paired(
    argument: str, tensors: Mapping[str, torch.Tensor], mapping: NameMap, tree: Tree | None
) -> list[Pair]:
    """Pairs each torch tensor with its part of a Flax leaf.

    Args:
        argument: the name of the caller's argument, for errors.
        tensors: by torch's names.
        mapping: from torch's names to Flax's.
        tree: the Flax leaves; without them, torch's tensors are only compared with each other.

    Raises:
        ValueError: a tensor or leaf has no partner, or a partner of another shape or format; one error lists
            all.
    """
    pairs, unknown = _pairs(tensors, mapping, tree)
    in_torch, in_flax, different = [], [], []
    parts: dict[Key, dict[tuple[int, ...], Pair]] = {}
    for pair in pairs:
        where = _path(pair.key, pair.place.layer)
        first = parts.setdefault(pair.key, {}).setdefault(pair.place.layer, pair)
        if first != pair and not ties({"one": tensors[first.name], "other": tensors[pair.name]}):
            different.append(f"{first.name} and {pair.name} are both {where}")
        form = _form_in_flax(tensors[pair.name], pair.place)
        if isinstance(form, str):
            different.append(f"{pair.name}: {form}")
        elif tree is not None and pair.key not in tree.leaves:
            in_torch.append(f"{pair.name}, which would be {where}")
        elif tree is not None and (found := _difference(form, tree.leaves[pair.key], pair.place.layer)):
            different.append(f"torch's {pair.name} would be {where}, {form}; Flax has {found}")
    for key in parts if tree is None else {**parts, **tree.leaves}:
        if tree is None or (key in tree.leaves and tree.is_torchs(key)):
            in_flax += _without_tensor(key, parts.get(key, {}), tree)
    lists = {
        "only in torch": in_torch,
        "only in Flax": in_flax,
        "different": different,
        "no rename fits": unknown,
    }
    if any(lists.values()):
        start = f"`{argument}`: expected each tensor to have its like on the other side; got\n"
        raise ValueError(start + "".join(_listed(*each) for each in lists.items()) + _ADVICE)
    return pairs


def _pairs(
    tensors: Mapping[str, torch.Tensor], mapping: NameMap, tree: Tree | None
) -> tuple[list[Pair], list[str]]:
    """The pairs, unchecked, and the names that no rename matches.

    A tensor tied to an earlier tensor (a head to an embedding) has the earlier tensor's place where its own
    place is not in the tree, and always without a tree.
    """
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
            if mapping.fitting(weight) is None:
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


def _form_in_flax(tensor: torch.Tensor, place: Place) -> _Form | str:
    """The form of a torch tensor in Flax's order, or the reason why it has none."""
    try:
        shape = place.arrange(torch.empty(tensor.shape, device="meta")).shape
    except RuntimeError:
        return f"shape {list(tensor.shape)} does not take axes={place.axes}, shape={place.shape}"
    return _Form(dtype_name(codes_of(tensor)), tuple(shape), is_scaled(tensor))


def _form(leaf: Any, leading: int = 0) -> _Form:
    """The form of one layer of a Flax leaf with `leading` axes of layers."""
    codes, scale = codes_and_scale(leaf)
    return _Form(dtype_name(codes), tuple(codes.shape[leading:]), scale is not None)


def _difference(form: _Form, leaf: Any, index: tuple[int, ...]) -> str:
    """The form of a Flax leaf whose part cannot be a tensor of another form; "" if it can."""
    codes, scale = codes_and_scale(leaf)
    layers = tuple(codes.shape[: len(index)])
    if len(layers) < len(index) or any(i >= n for i, n in zip(index, layers, strict=True)):
        return f"{list(layers)} layers"
    found = _form(leaf, len(index))
    if form != found:
        return str(found)
    if scale is not None and tuple(scale.shape) not in ((), layers + (1,) * len(form.shape)):
        return f"scales of shape {list(scale.shape)}, and a torch tensor has one"
    return ""


def _without_tensor(key: Key, parts: Mapping[tuple[int, ...], Pair], tree: Tree | None) -> list[str]:
    """The layers of a leaf that have no torch tensor."""
    indices = list(parts) or [()]
    if tree is None:
        layers, form = tuple(int(n) + 1 for n in np.max(indices, axis=0)), ""
    else:
        leaf = tree.leaves[key]
        layers = tuple(codes_and_scale(leaf)[0].shape[: len(indices[0])])
        form = f", {_form(leaf, len(layers))}"
    return [_path(key, index) + form for index in np.ndindex(*layers) if index not in parts]


def _path(key: Key, index: tuple[int, ...]) -> str:
    return "/".join(key) + "".join(f"[{i}]" for i in index)


def _listed(kind: str, lines: Iterable[str]) -> str:
    lines = list(lines)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"  {kind}: {line}\n" for line in lines[:_SHOWN] + more)
