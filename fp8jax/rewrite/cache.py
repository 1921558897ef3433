"""Cached programs of a function, by what their traces depend on."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

# Number of cached programs of one model, for different input shapes.
_MAX_PROGRAMS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Cached programs.

    Constants without a hash, such as a dataclass of settings, are compared by value with a copy of theirs,
    because they may be changed in place.
    """

    _by_hash: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _by_value: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)

    def __reduce__(self) -> Any:
        """A pickled or copied cache is empty: programs cannot be pickled."""
        return type(self), ()

    def __len__(self) -> int:
        return len(self._by_hash) + len(self._by_value)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._by_hash.values(), (program for *_, program in self._by_value))

    def find(self, types: Any, constants: Any) -> Any:
        """The program for inputs of these types and these constants; None without one."""
        try:
            return self._by_hash.get((types, constants))
        except TypeError:
            pairs = (
                (own, program) for own_types, own, program in self._by_value if _is_same(own_types, types)
            )
            return next((program for own, program in pairs if _is_same(own, constants)), None)

    def add(self, types: Any, constants: Any, program: Any) -> None:
        """Adds a program, and removes the oldest if there are many."""
        try:
            self._by_hash[types, constants] = program
        except TypeError:
            self._add_by_value(types, constants, program)
        while len(self._by_hash) > _MAX_PROGRAMS:
            del self._by_hash[next(iter(self._by_hash))]
        del self._by_value[:-_MAX_PROGRAMS]

    def _add_by_value(self, types: Any, constants: Any, program: Any) -> None:
        try:
            own = copy.deepcopy(constants)
        except Exception:
            return  # a value that cannot be copied is traced anew
        # A copy of a value that is compared by identity would never be found.
        if _is_same(own, constants):
            self._by_value.append((types, own, program))


def _is_same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False  # such as a comparison of arrays
