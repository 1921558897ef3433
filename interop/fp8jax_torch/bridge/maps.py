"""The name map of models with the same module names in torch and in Flax.

>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
>>> mapping_of(model).place("0.weight"), mapping_of(model).place("1.weight").path
(Place(path=('0', 'kernel'), layer=(), axes=(1, 0), shape=None), ('1', 'scale'))
"""

import re
from typing import Any

import torch

from fp8jax.checkpoints import NameMap, Rename

_CONVOLUTIONS = {
    torch.nn.Conv1d: (2, 1, 0),
    torch.nn.Conv2d: (2, 3, 1, 0),
    torch.nn.Conv3d: (2, 3, 4, 1, 0),
}


def mapping_of(model: torch.nn.Module) -> NameMap:
    """The map to a Flax model with the module names of a torch model.

    A module `a.b.0` is `a/b/0`. Its weight is `kernel` in Linear (transposed), transformers' Conv1D (in the
    same order) and convolutions (channels last), `scale` in norms and `embedding` in embeddings. A bias is
    `bias` everywhere. Other parameters and buffers keep their names and shapes.
    `NameMap.moved` and `NameMap.stacked` adapt the map, and renames added in front of it take precedence.

    Scaling state follows the weights without a rename.

    Raises:
        ValueError: the model has a module that no Flax layer stores alike: torch's MultiheadAttention and
            recurrent modules.
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
            to = f"{path}/{own if name == 'weight' else name}".removeprefix("/")
            to = to.replace("\\", r"\\")  # it is a template of a replacement
            renames.append(Rename(re.escape(full), to, axes if name == "weight" else None))
    return NameMap(tuple(renames))


def _weight_of(module: Any) -> tuple[str, tuple[int, ...] | None]:
    """Flax's name of a module's weight, and the order of its dimensions."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    for kind, axes in _CONVOLUTIONS.items():
        if isinstance(module, kind):
            return "kernel", axes
    if isinstance(module, torch.nn.Linear):
        return "kernel", (1, 0)
    if isinstance(module, torch.nn.Embedding):
        return "embedding", None
    if "Conv1D" in kinds:  # transformers', shape=(in, out)
        return "kernel", None
    # Models bring their own classes of RMS norms.
    return ("scale" if any("Norm" in kind for kind in kinds) else "weight"), None
