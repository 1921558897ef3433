"""Mixins for objects of a user's class: the class becomes a subclass of the mixin and the old class."""

import functools
from typing import Any


@functools.cache
def mixed(mixin: type, base: type) -> Any:
    """The subclass of a mixin and a class; its objects are copied and pickled by the names of both."""
    methods = {"__module__": __name__, "__reduce_ex__": _reduce}
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), methods)


def unmixed(made: type) -> type:
    """The `base` of a `mixed` class."""
    return made.__bases__[1]


def _reduce(self: Any, protocol: Any) -> Any:
    _, _, *state = super(type(self), self).__reduce_ex__(2)
    return _empty, type(self).__bases__, *state


def _empty(mixin: type, base: type) -> Any:
    """An unpickled object without its state."""
    made = mixed(mixin, base)
    return made.__new__(made)
