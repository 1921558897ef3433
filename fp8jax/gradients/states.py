"""The scaling state of one parameter, in a tree of dicts that is named as the tree of parameters."""

from collections.abc import Mapping
from typing import Any


def state_at(states: Any, path: Any) -> Mapping[str, Any]:
    """The scaling state of the parameter at a path of JAX's; {} if it has none."""
    found = states
    for name in _names(states, path):
        found = found[name]
    is_state = isinstance(found, Mapping) and not any(isinstance(x, Mapping) for x in found.values())
    return found if is_state else {}


def with_state_at(states: Mapping[Any, Any], path: Any, new: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The states with another one at a path that has one."""
    return _replaced(states, _names(states, path), new)


def _replaced(states: Any, names: list[Any], new: Any) -> Any:
    if not names:
        return new
    return {**states, names[0]: _replaced(states[names[0]], names[1:], new)}


def _names(states: Any, path: Any) -> list[Any]:
    """The keys to the parameter's state. They end before names of a box around the parameter, as of axis
    names; what is no dict's key among the parameters is a text among the states."""
    keys = []
    for part in path:
        name = next((getattr(part, of) for of in ("key", "name", "idx") if hasattr(part, of)), part)
        name = name if isinstance(states, Mapping) and name in states else str(name)
        if not isinstance(states, Mapping) or name not in states:
            break
        keys.append(name)
        states = states[name]
    return keys
