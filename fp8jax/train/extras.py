"""Packages of the extra `train`, imported when they are needed and not before."""

import importlib
import importlib.util
from typing import Any

PACKAGES = ("matplotlib", "rich", "yaml")


def need(module: str) -> Any:
    """The module, imported; see `check`."""
    return importlib.import_module(module)


def check() -> None:
    """Raises ImportError if one of the extra's packages is not installed, before any work is done."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"not installed: {', '.join(missing)}; run: pip install 'fp8jax[train]'")
