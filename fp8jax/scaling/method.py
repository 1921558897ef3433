"""`ScaleMethod`, the interface of the ways to compute the scale of a tensor."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

State = dict[str, Float[Array, "..."]]


class ScaleMethod(NamedTuple):
    """Three pure functions over a dict of float32 arrays, as in optax.

        state = method.init(n)                       # for the n operands of a dot
        scale = method.scale(state, i, amax, max)    # for the cast of operand i, this step
        state = method.update(state, amaxes, maxes)  # for the next step

    `amax` is the amax of operand i, shape (); `max` is the max of its format. `update` takes all operands at
    once, shape (n,), because on a GPU n scalars cost as much as one.
    """

    init: Callable[[int], State]
    scale: Callable[[State, int, Float[Array, ""], float], Float[Array, ""]]
    update: Callable[[State, Float[Array, " n"], Float[Array, " n"]], State]
