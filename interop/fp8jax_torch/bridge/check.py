"""Whether every tensor of one side has its like on the other: one error lists all that does not fit."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fp8jax_torch.bridge.crossing import name_of
from fp8jax_torch.bridge.names import Place
from fp8jax_torch.bridge.slots import Slot, Slots, codes_of, ties
from fp8jax_torch.bridge.trees import Key, Tree, codes_and_scale
from fp8jax_torch.scaled import is_scaled

_SHOWN = 8  # differences of a kind in an error

_ADVICE = (
    "Build both models of one size and transform both by one recipe. `mapping` says which tensor is where; "
    "see `NameMap.moved`, `NameMap.stacked`, and `Rename`, whose `flax=None` leaves a tensor out.\n"
)


class Form(NamedTuple):
    """What both sides must agree on."""

    dtype: str
    shape: tuple[int, ...]
    is_scaled: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' codes on a scale' if self.is_scaled else ''}"


def check(argument: str, tensors: Mapping[str, torch.Tensor], slots: Slots, tree: Tree | None) -> None:
    """Compares both sides; without a tree only torch's tensors with each other.

    Raises:
        ValueError: something is on one side only, or has another shape or format there.
    """
    in_torch, in_flax, different = [], [], []
    parts: dict[Key, dict[tuple[int, ...], Slot]] = {}
    for slot in slots.found:
        where = _path(slot.key, slot.place.layer)
        before = parts.setdefault(slot.key, {}).setdefault(slot.place.layer, slot)
        if before != slot and not ties({"one": tensors[before.name], "other": tensors[slot.name]}):
            different.append(f"{before.name} and {slot.name} are both {where}")
        got = _form_in_flax_order(tensors[slot.name], slot.place)
        if isinstance(got, str):
            different.append(f"{slot.name}: {got}")
        elif tree is not None and slot.key not in tree.leaves:
            in_torch.append(f"{slot.name}, which would be {where}")
        elif tree is not None:
            leaf = tree.leaves[slot.key]
            said = _difference(got, leaf, slot.place.layer)
            different += [f"torch's {slot.name} would be {where}, {got}; Flax has {said}"] if said else []
    keys = parts if tree is None else {**parts, **tree.leaves}
    for key in keys:
        if tree is None or (key in tree.leaves and tree.is_torchs(key)):
            in_flax += _without_slot(key, parts.get(key, {}), tree)
    said = [
        _listed("only in torch", in_torch),
        _listed("only in Flax", in_flax),
        _listed("different", different),
        _listed("no rename fits", slots.unknown),
    ]
    if any(said):
        start = f"`{argument}`: expected each tensor to have its like on the other side; got\n"
        raise ValueError(start + "".join(said) + _ADVICE)


def _form_in_flax_order(tensor: torch.Tensor, place: Place) -> Form | str:
    """The form that a torch tensor has in Flax, or why it has none."""
    try:
        shape = place.arrange(torch.empty(tensor.shape, device="meta")).shape
    except RuntimeError:
        return f"shape {list(tensor.shape)} does not take axes={place.axes}, shape={place.shape}"
    return Form(name_of(codes_of(tensor)), tuple(shape), is_scaled(tensor))


def _form(leaf: Any, leading: int = 0) -> Form:
    """The form of one layer's part of a Flax leaf."""
    codes, scale = codes_and_scale(leaf)
    return Form(name_of(codes), tuple(codes.shape[leading:]), scale is not None)


def _difference(got: Form, leaf: Any, index: tuple[int, ...]) -> str:
    """What a Flax leaf is, if a tensor of the form `got` cannot be its part."""
    codes, scale = codes_and_scale(leaf)
    layers = tuple(codes.shape[: len(index)])
    if len(layers) < len(index) or any(i >= n for i, n in zip(index, layers, strict=True)):
        return f"{list(layers)} layers"
    form = _form(leaf, len(index))
    if got != form:
        return str(form)
    if scale is not None and tuple(scale.shape) not in ((), layers + (1,) * len(form.shape)):
        return f"scales of shape {list(scale.shape)}, and a torch tensor has one"
    return ""


def _without_slot(key: Key, parts: Mapping[tuple[int, ...], Any], tree: Tree | None) -> list[str]:
    """The layers of a leaf that no torch tensor is."""
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


def _listed(what: str, lines: Iterable[str]) -> str:
    lines = list(lines)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"  {what}: {line}\n" for line in lines[:_SHOWN] + more)
