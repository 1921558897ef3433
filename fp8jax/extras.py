"""Optional parts of fp8jax, what a message says about installing them, and the user's own modules."""

import importlib
import importlib.metadata
import os
import pkgutil
import sys
from typing import Any


def need(module: str, extra: str = "train") -> Any:
    """Imports a module of an optional package.

    Args:
        module: its name.
        extra: the extra of pyproject.toml that the package belongs to.

    Raises:
        ImportError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"not installed: {module}; {install(extra)}") from None


def install(extra: str) -> str:
    """How to install an extra of pyproject.toml. No package index has fp8jax yet: its source does."""
    return f"run `pip install '.[{extra}]'` in the folder of fp8jax's source"


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_up(name: str) -> Any:
    """The object with the name "package.module:name", also of a module in the current folder.

    Its module may raise anything.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(name)
