"""The linear layers of a torch model, and which of them a recipe puts into FP8.

A layer's path is its name in `named_modules()` with "/" for the dots, so that a recipe's patterns match as on
the JAX side.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax.rewrite.patterns import Layer
from fp8jax.rewrite.rules import Rules


def is_conv1d(module: nn.Module) -> bool:
    """Whether the layer is transformers' `Conv1D`, GPT-2's linear layer with a weight of shape (in, out)."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether the layer is `nn.Linear` or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_norm(module: nn.Module) -> bool:
    """Whether the layer is a LayerNorm or RMSNorm, of any library (`LlamaRMSNorm`)."""
    return any(cls.__name__.endswith(("LayerNorm", "RMSNorm")) for cls in type(module).__mro__)


def weighted(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers, norms, and other modules with direct parameters, by path, each once."""
    return {
        name.replace(".", "/"): module
        for name, module in model.named_modules()
        if is_linear(module) or is_norm(module) or any(True for _ in module.parameters(recurse=False))
    }


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers among `weighted`."""
    return {path: module for path, module in weighted(model).items() if is_linear(module)}


def choose(
    model: nn.Module, recipe: Recipe, why_not: Callable[[nn.Module], str | None]
) -> dict[str, str | None]:
    """For each linear layer's path None if it runs in FP8, else the reason, of the recipe or by `why_not`.

    Raises:
        ValueError: a pattern of the recipe, other than the default, matches no layer.
    """
    rules, layers = Rules(recipe), [Layer(path, module, ()) for path, module in linears(model).items()]
    rules.check(layers)
    return {layer.path: rules.choose(layer).reason or why_not(layer.module) for layer in layers}


def why_not_converted(module: nn.Module) -> str | None:
    """The reason why another forward of this linear layer would change the model, or None.

    The layer must compute `x @ weight.T + bias`, and only its forward may use its parameters.
    """
    if isinstance(module, nn.LazyLinear):
        return "its shape is not known before its first call"
    if module._parameters.get("weight") is None:
        return "its weight is not a parameter but computed from others"
    weight: Any = module.weight
    if not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and does not call it"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} overrides forward"
    if "forward" in vars(module):
        return "its forward was replaced"
    return None


def why_not_replaced(module: Any, library: str, multiple: int = 1) -> str | None:
    """The reason why a library's layer with the same weight cannot replace this linear layer, or None.

    The library's layer needs dimensions that are multiples of `multiple`.
    """
    if is_conv1d(module):
        return f"Conv1D keeps its weight as (in, out), and {library} as (out, in)"
    if reason := why_not_converted(module):
        return reason
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks that would be lost"
    if any(size % multiple for size in module.weight.shape):
        return f"its dims {list(module.weight.shape)} are not all multiples of {multiple}"
    return None


def shared_weights(model: nn.Module) -> dict[str, str]:
    """For each linear layer that shares its weight with another module, that module's path."""
    owners: dict[int, list[str]] = {}
    for path, module in weighted(model).items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(path)
    pairs = [(path, other) for paths in owners.values() for path in paths for other in paths if other != path]
    found = linears(model)
    return {path: other for path, other in reversed(pairs) if path in found}  # the first other


def swap(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replaces the keys of `new` by its values everywhere in the model, in place; returns the model."""
    for parent in list(model.modules()):
        # `named_children` would list a layer in two places only once.
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                setattr(parent, name, new[child])
    return new.get(model, model)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
