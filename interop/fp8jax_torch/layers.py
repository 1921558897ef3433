"""The linear layers of a torch model, and which of them a recipe puts into FP8.

A layer's path is its name in `named_modules()` with "/" for the dots, so that a recipe's patterns match as on
the JAX side.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax.rewrite.rules import Layer, Rules


def path_of(name: str) -> str:
    """The path of a module by its name in `named_modules()`."""
    return name.replace(".", "/")


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, GPT-2's linear layer with a weight of shape (in, out)."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether it is `nn.Linear` or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a LayerNorm or RMSNorm, of any library (`LlamaRMSNorm`)."""
    return any(cls.__name__.endswith(("LayerNorm", "RMSNorm")) for cls in type(module).__mro__)


def weighted(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with parameters of their own, linear layers and norms, by path, each once."""
    return {
        path_of(name): module
        for name, module in model.named_modules()
        if is_linear(module) or is_norm(module) or any(True for _ in module.parameters(recurse=False))
    }


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers among `weighted`."""
    return {path: module for path, module in weighted(model).items() if is_linear(module)}


def choose(
    model: nn.Module, recipe: Recipe, unable: Callable[[nn.Module], str | None]
) -> dict[str, str | None]:
    """Chooses the linear layers that run in FP8.

    Args:
        model: any model.
        recipe: with patterns.
        unable: the reason why a backend cannot run a layer in FP8, or None.

    Returns:
        For each linear layer's path None if it runs in FP8, else the reason.

    Raises:
        ValueError: a pattern of the user's matches no layer.
    """
    found, rules = linears(model), Rules(recipe)
    rules.check(list(found))
    return {
        path: rules.choose(Layer(path, module, ())).reason or unable(module) for path, module in found.items()
    }


def why_not_called(module: nn.Module) -> str | None:
    """Why another forward of this linear layer would change the model, or None.

    A call of the layer must be the only use of its parameters, and compute `x @ weight.T + bias`.
    """
    if isinstance(module, nn.LazyLinear):
        return "its shape is not known before its first call"
    if module._parameters.get("weight") is None:
        return "its weight is not a parameter but computed from others"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and does not call it"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in vars(module):
        return "its forward was replaced"
    return None


def why_not_swapped(module: nn.Module) -> str | None:
    """Why replacing this linear layer by another module would change the model, or None."""
    if reason := why_not_called(module):
        return reason
    if any(
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    ):
        return "it has hooks that would be lost"
    return None


def shared_weights(model: nn.Module) -> dict[str, str]:
    """For each linear layer that shares its weight with another module, that module's path."""
    owners: dict[int, list[str]] = {}
    for path, module in weighted(model).items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(path)
    found = linears(model)
    return {
        path: next(other for other in paths if other != path)
        for paths in owners.values()
        for path in paths
        if len(set(paths)) > 1 and path in found
    }


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
