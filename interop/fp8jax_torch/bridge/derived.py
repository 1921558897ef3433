"""The map of a model whose modules have the same names on both sides.

>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
>>> mapping_of(model).place("0.weight"), mapping_of(model).place("1.weight").path
(Place(path=('0', 'kernel'), layer=(), axes=(1, 0), shape=None), ('1', 'scale'))
"""

import re
from typing import Any

import torch

from fp8jax_torch.bridge.names import NameMap, Rename

_CONVOLUTIONS = {
    torch.nn.Conv1d: (2, 1, 0),
    torch.nn.Conv2d: (2, 3, 1, 0),
    torch.nn.Conv3d: (2, 3, 4, 1, 0),
}


def mapping_of(model: torch.nn.Module) -> NameMap:
    """The map to a Flax model whose modules have the torch model's names.

    A module `a.b.0` is `a/b/0`, and Flax's layers have their own names for what is in them: `kernel` of
    Linear (transposed), of transformers' Conv1D (as it is) and of convolutions (channels last), `scale` of
    norms, `embedding` of embeddings, `bias` of all. Other parameters and buffers keep their names and shapes.
    With `NameMap.moved` names that differ are moved, with `NameMap.stacked` layers are stacked, and a
    `NameMap` added before it says what is special.

    Args:
        model: any torch model, transformed or not.

    Returns:
        One rename for each tensor of the model's `state_dict`, but for scaling state, which goes with
        the weights.

    Raises:
        ValueError: a module with tensors that Flax has in another form: torch's MultiheadAttention and
            recurrent ones.
    """
    renames = []
    for path, module in model.named_modules():
        own_tensors = {**module._parameters, **module._buffers}
        tensors = [name for name, tensor in own_tensors.items() if tensor is not None]
        if not tensors or path.rpartition(".")[2] == "fp8":
            continue
        if isinstance(module, torch.nn.MultiheadAttention | torch.nn.RNNBase | torch.nn.RNNCellBase):
            raise ValueError(
                f"`model`: no Flax layer keeps its weights as {type(module).__name__} does, here "
                f"{path!r}; write a `Rename` for each of its tensors."
            )
        own, axes = _weight_of(module)
        for name in tensors:
            full = f"{path}.{name}" if path else name
            to = f"{path}/{own if name == 'weight' else name}"
            # As a template of a replacement it stands for itself.
            to = to.replace("\\", r"\\")
            renames.append(Rename(re.escape(full), to, axes if name == "weight" else None))
    return NameMap(tuple(renames))


def _weight_of(module: Any) -> tuple[str, tuple[int, ...] | None]:
    """What Flax calls a module's weight, and how it orders its dims."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    for kind, axes in _CONVOLUTIONS.items():
        if isinstance(module, kind):
            return "kernel", axes
    if isinstance(module, torch.nn.Linear):
        return "kernel", (1, 0)
    if isinstance(module, torch.nn.Embedding):
        return "embedding", None
    if "Conv1D" in kinds:  # of transformers, which keeps (in, out)
        return "kernel", None
    # Models write RMS norms of their own.
    return ("scale" if any("Norm" in kind for kind in kinds) else "weight"), None
