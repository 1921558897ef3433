"""Cached programs of a function, by what their traces depend on."""

import copy
import dataclasses
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax.core

# Number of cached programs of one model, for different input shapes.
_MAX_PROGRAMS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Cached programs.

    Constants without a hash, such as a dataclass of settings, are compared by value with a copy of theirs,
    because they may be changed in place. All programs are of one function with the same `contents_of`.
    """

    _by_hash: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _by_value: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)
    _contents: list[Any] = dataclasses.field(default_factory=list)

    def __reduce__(self) -> Any:
        """A pickled or copied cache is empty: programs cannot be pickled."""
        return type(self), ()

    def __len__(self) -> int:
        return len(self._by_hash) + len(self._by_value)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._by_hash.values(), (program for *_, program in self._by_value))

    def find(self, fn: Callable[..., Any], types: Any, constants: Any) -> Any:
        """The program of the function for inputs of these types and these constants; None without one."""
        contents = contents_of(fn)
        if list(map(id, contents)) != list(map(id, self._contents)):
            self._by_hash.clear()
            self._by_value.clear()
            self._contents[:] = contents
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


def contents_of(fn: Callable[..., Any]) -> list[Any]:
    """The objects that a function's code takes from its closure and from the globals; None for a tracer."""
    while not isinstance(fn, types.FunctionType) or hasattr(fn, "__wrapped__"):
        inner = fn.func if isinstance(fn, functools.partial) else inspect.unwrap(fn)
        inner = getattr(inner, "__func__", inner)
        if inner is fn:
            return []
        fn = inner
    found = [_content(cell) for cell in fn.__closure__ or ()]
    found += [fn.__globals__.get(name) for name in _globals_of(fn.__code__)]
    return [None if isinstance(x, jax.core.Tracer) else x for x in found]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals that the code and the code in it read."""
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(names | dict.fromkeys(itertools.chain.from_iterable(map(_globals_of, inner))))
