"""Access to the scaling state of a parameter by the parameter's path."""

from collections.abc import Mapping
from typing import Any


def state_at(states: Any, path: Any) -> Mapping[str, Any]:
    """The scaling state of the parameter at a JAX tree path; {} without a state."""
    found = states
    for name in _names(states, path):
        found = found[name]
    is_state = isinstance(found, Mapping) and not any(isinstance(x, Mapping) for x in found.values())
    return found if is_state else {}


def with_state_at(states: Any, path: Any, new: Mapping[str, Any]) -> Any:
    """The states with `new` in place of the state at `path`."""
    names = _names(states, path)
    if not names:
        return new
    return {**states, names[0]: with_state_at(states[names[0]], path[1:], new)}


def _names(states: Any, path: Any) -> list[Any]:
    """The keys of the parameter's state, without names of a box around the parameter, as for logical axes.
    Other tree keys than dict keys, such as list indices, are strings among the states."""
    keys = []
    for part in path:
        name = next((getattr(part, of) for of in ("key", "name", "idx") if hasattr(part, of)), part)
        name = name if isinstance(states, Mapping) and name in states else str(name)
        if not isinstance(states, Mapping) or name not in states:
            break
        keys.append(name)
        states = states[name]
    return keys
