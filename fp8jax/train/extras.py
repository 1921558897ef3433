"""Packages of the extra `train`, imported when they are needed and not before."""

import importlib
import importlib.util
from typing import Any

PACKAGES = ("matplotlib", "rich", "yaml")  # what every program with settings and a report uses


def need(module: str) -> Any:
    """The module, imported; raises ImportError that names the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(_advice([module])) from None


def check(*more: str) -> None:
    """Raises ImportError if a package of the extra is not installed, before any work is done.

    Args:
        more: what the program uses besides `PACKAGES`: "grain" if it reads through a `Loader`.
    """
    missing = [name for name in (*PACKAGES, *more) if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(_advice(missing))


def _advice(missing: list[str]) -> str:
    return f"not installed: {', '.join(missing)}; run: pip install 'fp8jax[train]'"
