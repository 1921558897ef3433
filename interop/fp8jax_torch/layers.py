"""Which layers of a torch model a recipe is for.

A layer's path is its name in `named_modules()` with "/" for the dots, so that a recipe's patterns mean the
same as on the JAX side:

    >>> from fp8jax.recipe import Recipe
    >>> from fp8jax_torch.layers import path_of, why_not
    >>> why_not(Recipe.TE, path_of("transformer.h.0.attn.c_attn"))
    >>> why_not(Recipe.TE, "lm_head")
    'exclude=lm_head'
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from fp8jax.recipe import DEFAULT_EXCLUDE, Recipe


def path_of(name: str) -> str:
    """A module's name in `named_modules()` as patterns see it."""
    return name.replace(".", "/")


def matches(pattern: str, path: str) -> bool:
    """Shell-style: a pattern with "/" against the path, one without against the last name; after "re:" a
    regular expression against the whole path."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), path) is not None
    return fnmatch.fnmatchcase(path if "/" in pattern else path.rsplit("/", 1)[-1], pattern)


def why_not(recipe: Recipe, path: str) -> str | None:
    """None if the recipe wants the layer at `path` in FP8, else the part of it that does not."""
    if recipe.gemm != "FP8":
        return f"gemm={recipe.gemm}"
    if not any(matches(pattern, path) for pattern in recipe.include):
        return f"not in include={'+'.join(recipe.include)}"
    for pattern in recipe.exclude:
        if matches(pattern, path):
            return f"exclude={pattern}"
    return None


def check_patterns(recipe: Recipe, paths: Sequence[str]) -> None:
    """Checks that every pattern that the user gave is about a layer.

    Args:
        recipe: the recipe; its default `exclude` names layers that a model need not have.
        paths: paths of all layers that could be in FP8.

    Raises:
        ValueError: a pattern matches none of them.
    """
    if recipe.gemm != "FP8":
        return
    given = [("include", pattern) for pattern in recipe.include if pattern != "*"]
    if recipe.exclude != DEFAULT_EXCLUDE:
        given += [("exclude", pattern) for pattern in recipe.exclude]
    for name, pattern in given:
        if not any(matches(pattern, path) for path in paths):
            raise ValueError(
                f"recipe: the {name} pattern {pattern!r} matches no layer; the layers are "
                f"{', '.join(map(_shown, paths)) or 'none'}."
            )


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, a linear layer whose weight is (in, out), as GPT-2 has it."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether it multiplies its input by a weight of its own: `nn.Linear` or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a LayerNorm or RMSNorm, a library's own one (`LlamaRMSNorm`) too."""
    return any(cls.__name__.endswith(("LayerNorm", "RMSNorm")) for cls in type(module).__mro__)


def weighted(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that has parameters of its own, and every norm without any, by path, each once."""
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
    """Which linear layers run in FP8, and why the others do not.

    Args:
        model: any model.
        recipe: whose patterns choose.
        unable: why a backend cannot run a layer in FP8, or None.

    Returns:
        By path of each linear layer None if it runs in FP8, else the reason.

    Raises:
        ValueError: a pattern that the user gave matches no layer.
    """
    found = linears(model)
    check_patterns(recipe, list(found))
    return {path: why_not(recipe, path) or unable(module) for path, module in found.items()}


def why_not_called(module: nn.Module) -> str | None:
    """Why another forward of this linear layer would change the model, or None.

    What it computes must be `x @ weight.T + bias` with parameters of its own, asked for by calling it.
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
    """Why putting another module in the place of this linear layer would change the model, or None."""
    if reason := why_not_called(module):
        return reason
    if any(
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    ):
        return "it has hooks that would be lost"
    return None


def shared_weights(model: nn.Module) -> dict[str, str]:
    """By path of each linear layer whose weight another module has too, that module's path."""
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
    """The model with the keys of `new` replaced by its values, wherever they stand; changed in place."""
    for parent in list(model.modules()):
        # Not `named_children`, which names a layer that stands in two places once.
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                setattr(parent, name, new[child])
    return new.get(model, model)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _shown(path: str) -> str:
    return path or "(the model itself)"
