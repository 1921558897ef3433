"""Mixins for objects of a user's class: the class becomes a subclass of the mixin and the old class."""

import functools
from typing import Any


@functools.cache
def mixed(mixin: type, base: type) -> Any:
    """The subclass of a mixin and a class; its objects are copied and pickled by the names of both."""

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = super(made, self).__reduce_ex__(2)
        return _empty, (mixin, base), *state

    methods = {"__module__": __name__, "__reduce_ex__": reduce}
    made = type(f"{mixin.__name__}{base.__name__}", (mixin, base), methods)
    return made


def unmixed(made: type) -> type:
    """The `base` of a `mixed` class."""
    return made.__bases__[1]


def _empty(mixin: type, base: type) -> Any:
    """An unpickled object without its state."""
    made = mixed(mixin, base)
    return made.__new__(made)
