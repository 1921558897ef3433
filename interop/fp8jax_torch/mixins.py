"""Objects of a user's class that do one thing otherwise: their class becomes one of a mixin and theirs."""

import functools
from typing import Any


class Mixin:
    """What objects of `mixed` classes have in common: they are copied and pickled by both parts' names."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(2)
        return _empty, type(self).__bases__, *state


@functools.cache
def mixed(mixin: type[Mixin], base: type) -> Any:
    """The class of an object of class `base` that does what `mixin` has."""
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": __name__})


def unmixed(made: type) -> type:
    """The `base` of a `mixed` class."""
    return made.__bases__[1]


def _empty(mixin: type[Mixin], base: type) -> Any:
    """What is unpickled, before its state comes."""
    made = mixed(mixin, base)
    return made.__new__(made)
