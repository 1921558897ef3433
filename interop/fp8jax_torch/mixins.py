"""Mixins for objects of a user's class: the object's class becomes a class of the mixin and its own."""

import functools
from typing import Any


class Mixin:
    """Base of mixins: objects of `mixed` classes are copied and pickled by the names of both parts."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(2)
        return _empty, type(self).__bases__, *state


@functools.cache
def mixed(mixin: type[Mixin], base: type) -> Any:
    """The class of a mixin and a base class."""
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": __name__})


def unmixed(made: type) -> type:
    """The `base` of a `mixed` class."""
    return made.__bases__[1]


def _empty(mixin: type[Mixin], base: type) -> Any:
    """An unpickled object without its state."""
    made = mixed(mixin, base)
    return made.__new__(made)
