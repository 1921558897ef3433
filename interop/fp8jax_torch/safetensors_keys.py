"""A state dict without `ScaledTensor`s, for safetensors: their codes and scales as entries of their own.

    state = split(model.state_dict())     # "up.weight.codes" and "up.weight.scale" for "up.weight"
    model.load_state_dict(state)          # a layer under a recipe takes either form

The names differ from those of a plain model, so a plain model does not take codes for weights.
`prepare` lets `save_pretrained` of transformers' models, and with it their `Trainer`, save in this form.
"""

import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from fp8jax_torch.scaled import ScaledTensor, is_scaled

_CODES, _SCALE = ".codes", ".scale"
_SAVE = "save_pretrained"


def split(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with two plain entries in the place of each `ScaledTensor`."""
    new: dict[str, Any] = {}
    for name, entry in state.items():
        if is_scaled(entry):
            new[name + _CODES], new[name + _SCALE] = entry.codes, entry.scale
        else:
            new[name] = entry
    return new


def join(state: MutableMapping[str, Any], name: str, dtype: torch.dtype) -> None:
    """Makes the entry `name` of its two parts, in place; nothing without both."""
    if name + _CODES in state and name + _SCALE in state:
        codes, scale = state.pop(name + _CODES), state.pop(name + _SCALE)
        state[name] = ScaledTensor(codes, scale.reshape(()).float(), dtype)


def save_in_parts(model: nn.Module) -> None:
    """Changes `save_pretrained` of a transformers' model, if it has one; `save_as_before` undoes it."""
    if hasattr(model, _SAVE):
        setattr(model, _SAVE, functools.partial(_save_pretrained, model))


def save_as_before(module: nn.Module) -> None:
    """The inverse of `save_in_parts`."""
    vars(module).pop(_SAVE, None)


def _save_pretrained(model: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
    """As the class's, of `split` entries."""
    state = model.state_dict() if state_dict is None else state_dict
    return type(model).save_pretrained(model, *args, state_dict=split(state), **kwargs)
