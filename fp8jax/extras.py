"""Optional parts of fp8jax: their modules, and what a message says about installing them."""

import importlib
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
