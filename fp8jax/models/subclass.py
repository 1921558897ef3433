"""NNX modules that do something else: the same object, of a subclass that `transform` made."""

from collections.abc import Callable
from typing import Any


def change_class(module: Any, subclass_of: Callable[[type], type]) -> None:
    """Makes a module an instance of another class."""
    # NNX would take an assignment for an attribute of the model.
    object.__setattr__(module, "__class__", subclass_of(type(module)))


def subclass(cls: type, members: dict[str, Any]) -> type:
    """A class that looks like `cls` but for these members; `plain__fp8` is `cls`."""
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), {**names, **members, "plain__fp8": cls})
