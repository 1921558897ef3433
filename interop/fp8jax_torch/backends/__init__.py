"""Who multiplies on the torch side: one file per library, and the choosing between them.

| backend   | library           | runs on                          | expresses                       |
|-----------|-------------------|----------------------------------|---------------------------------|
| `msamp`   | MS-AMP            | H100                             | O1, O2, te+O2                   |
| `te`      | TransformerEngine | compute capability 8.9 or higher | te, and te with current scaling |
| `torchao` | torchao           | the same, and emulated on CPU    | te with current scaling         |
| `native`  | none but torch    | everywhere                       | see there                       |

Each file is what `base` describes. "auto" is MS-AMP if it is installed, else TransformerEngine if it can run
here, else native, each only if it can express the recipe; torchao is for those who ask for it by name.
"""

import importlib
from types import ModuleType

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch.backends import base

NAMES = ("msamp", "te", "torchao", "native")

_PREFERRED = ("msamp", "te")


def get(name: str) -> ModuleType:
    """The backend of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"`backend`: expected one of auto, {', '.join(NAMES)}; got {name!r}.")
    return importlib.import_module(f"fp8jax_torch.backends.{name}")


def choose(
    name: str, recipe: Recipe, device: torch.device | str | None = None, model: nn.Module | None = None
) -> tuple[ModuleType, str]:
    """The backend to use and, in one line, why.

    Args:
        name: "auto" or one of `NAMES`.
        recipe: what it must express.
        device: where the model will run; None is the GPU if there is one.
        model: "auto" passes by a library that can take no layer of it, as those that know `nn.Linear` alone
            and GPT-2.

    Returns:
        The backend's module, and text such as
        "native: msamp is not installed; transformer_engine is not installed".

    Raises:
        ValueError: an unknown name, a recipe that the named backend cannot express, or a pattern of it that
            matches no layer.
        ImportError: the named backend's library is not installed.
        RuntimeError: the named backend cannot run here.

    References:
        Accelerate 1.15.0, docs/source/usage_guides/low_precision_training.md: its order of backends.
    """
    where = base.this_device(None if device is None else torch.device(device))
    if name != "auto":
        return _named(name, recipe, where), f"{name}: asked for"
    passed: list[str] = []
    for candidate in _PREFERRED:
        module = get(candidate)
        # In this order: `supports` imports the library, which in MS-AMP's case changes torch.
        reason = (
            module.PACKAGE.missing()
            or module.refuses(recipe)
            or (model is not None and _why_no_layer(module, model, recipe))
            or module.supports(where)
        )
        if reason is None:
            return module, f"{candidate}: {'; '.join(passed) or 'the first choice'}"
        passed.append(reason)
    return _named("native", recipe, where), f"native: {'; '.join(passed)}"


def _why_no_layer(module: ModuleType, model: nn.Module, recipe: Recipe) -> str | None:
    """Why a backend is of no use for the model, or None."""
    try:
        module.plan(model, recipe)
    except base.NoLayer:
        return f"{module.NAME} can take no layer of the model"
    return None


def _named(name: str, recipe: Recipe, device: torch.device) -> ModuleType:
    """The backend of that name, if it can do this here; else raises as `choose` says."""
    module = get(name)
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
