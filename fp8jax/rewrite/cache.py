"""Cached programs of a function, by what their traces depend on."""

import copy
import dataclasses
import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.core

# Number of cached programs of one model, for different input shapes.
_MAX_PROGRAMS = 128
# Number of values of what a function reads, such as a model for training and for inference.
_MAX_CONTENTS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Cached programs of a function, by what its code reads (`contents_of`), and by its inputs.

    What a trace of the function rebinds itself, as a counter of its calls, does not count.
    """

    _by_contents: dict["_Identity", "_OfInputs"] = dataclasses.field(default_factory=dict)
    _rebound: set[int] = dataclasses.field(default_factory=set)

    def __reduce__(self) -> Any:
        """A pickled or copied cache is empty: programs cannot be pickled."""
        return type(self), ()

    def __len__(self) -> int:
        return sum(map(len, self._by_contents.values()))

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(list(self._by_contents.values()))

    def find(self, contents: list[Any], types: Any, constants: Any) -> Any:
        """The program for inputs of these types and these constants; None without one."""
        found = self._by_contents.get(self._identity(contents))
        return None if found is None else found.find(types, constants)

    def add(self, before: list[Any], after: list[Any], types: Any, constants: Any, program: Any) -> None:
        """Adds a program, and removes the oldest ones if there are many.

        Args:
            before, after: the contents of the function before and after its trace.
            types, constants: of the inputs.
            program: the program.
        """
        pairs = zip(before, after, strict=False)
        self._rebound.update(i for i, (old, new) in enumerate(pairs) if old is not new)
        self._by_contents.setdefault(self._identity(after), _OfInputs()).add(types, constants, program)
        while len(self._by_contents) > _MAX_CONTENTS:
            del self._by_contents[next(iter(self._by_contents))]

    def _identity(self, contents: list[Any]) -> "_Identity":
        return _Identity(tuple(None if i in self._rebound else x for i, x in enumerate(contents)))


class _Identity(NamedTuple):
    """Objects that are compared by identity."""

    objects: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and [*map(id, self.objects)] == [*map(id, other.objects)]

    def __hash__(self) -> int:
        return hash((*map(id, self.objects),))


@dataclasses.dataclass(frozen=True, eq=False)
class _OfInputs:
    """Programs by the types and the constants of their inputs.

    Constants without a hash, such as a dataclass of settings, are compared by value with a copy of theirs,
    because they may be changed in place.
    """

    _by_hash: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _by_value: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self._by_hash) + len(self._by_value)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._by_hash.values(), (program for *_, program in self._by_value))

    def find(self, types: Any, constants: Any) -> Any:
        """See `Programs.find`."""
        try:
            return self._by_hash.get((types, constants))
        except TypeError:
            pairs = (
                (own, program) for own_types, own, program in self._by_value if _is_same(own_types, types)
            )
            return next((program for own, program in pairs if _is_same(own, constants)), None)

    def add(self, types: Any, constants: Any, program: Any) -> None:
        """See `Programs.add`."""
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
    """The objects that the code of a function and of its wrappers takes from closures and from globals."""
    found, inner = list[Any](), fn
    while inner is not None:
        if isinstance(inner, types.FunctionType):
            found += map(_content, inner.__closure__ or ())
            found += [inner.__globals__.get(name) for name in _globals_of(inner.__code__)]
        inner = _inside(inner)
    # A tracer is of one trace. A program with one is not cached.
    return [None if isinstance(x, jax.core.Tracer) else x for x in found]


def _inside(fn: Any) -> Any:
    """The callable that a partial, a method, a wrapper or an object with `__call__` calls; else None."""
    if isinstance(fn, functools.partial):
        return fn.func
    if isinstance(fn, types.MethodType):
        return fn.__func__
    if (wrapped := getattr(fn, "__wrapped__", None)) is not None or isinstance(fn, types.FunctionType):
        return wrapped
    call = type(fn).__call__ if callable(fn) else None
    return call if isinstance(call, types.FunctionType) else None


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
