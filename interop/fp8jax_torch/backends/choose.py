"""The choice of a backend.

"auto" is MS-AMP if it is installed, else TransformerEngine if it can run here, else native; each only if it
can express the recipe. torchao runs only by name.
"""

import importlib
from types import ModuleType

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch.backends import base

NAMES = ("msamp", "te", "torchao", "native")


def choose(
    name: str, recipe: Recipe, device: torch.device, model: nn.Module | None = None
) -> tuple[ModuleType, str]:
    """The backend's module, and a reason such as "native: msamp is not installed; te is not installed".

    Args:
        name: "auto" or one of `NAMES`.
        recipe: to express.
        device: of the model.
        model: "auto" passes over a library that can run no layer of it, as those that replace only
            `nn.Linear` GPT-2's.

    Raises:
        ValueError: an unknown name, a recipe that the named backend cannot express, or a pattern of the
            recipe that matches no layer.
        ImportError: the named backend's library is not installed.
        RuntimeError: the named backend cannot run here.

    References:
        Accelerate 1.15.0, docs/source/usage_guides/low_precision_training.md: its order of backends.
    """
    if name != "auto":
        return _named(name, recipe, device), f"{name}: asked for"
    reasons: list[str] = []
    for candidate in ("msamp", "te"):
        module = _module(candidate)
        # In this order: `supports` imports the library, and importing MS-AMP changes torch.
        reason = (
            module.PACKAGE.missing()
            or module.refuses(recipe)
            or (model is not None and _why_no_layer(module, model, recipe))
            or module.supports(device)
        )
        if reason is None:
            return module, f"{candidate}: {'; '.join(reasons) or 'the first choice'}"
        reasons.append(reason)
    return _named("native", recipe, device), f"native: {'; '.join(reasons)}"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"fp8jax_torch.backends.{name}")


def _why_no_layer(module: ModuleType, model: nn.Module, recipe: Recipe) -> str | None:
    try:
        module.plan(model, recipe)
    except base.NoLayer:
        return f"{module.NAME} can take no layer of the model"
    return None


def _named(name: str, recipe: Recipe, device: torch.device) -> ModuleType:
    """The backend of that name; raises as `choose` says."""
    if name not in NAMES:
        raise ValueError(f"`backend`: expected one of auto, {', '.join(NAMES)}; got {name!r}.")
    module = _module(name)
    package = getattr(module, "PACKAGE", None)
    instead = "" if name == "native" else ' Or use backend="native".'
    if package is not None and package.missing():
        raise ImportError(
            f"`backend`: {name!r} cannot run here: {package.missing()}. "
            f"Get it with {package.install}.{instead}"
        )
    if reason := module.refuses(recipe):
        raise ValueError(
            f"`backend`: {name!r} cannot express the recipe {recipe}: {reason}. Change the recipe.{instead}"
        )
    if reason := module.supports(device):
        raise RuntimeError(f"`backend`: {name!r} cannot run here: {reason}.{instead}")
    return module
