"""An Adam step along one parameter: its mathematics, and what of it is rounded.

Nothing here says how much of a parameter is looked at: `passes` gives whole tensors,
`pieces` gives pieces of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.scaled import format_of, is_scaled, quantize, value


class Leaf(NamedTuple):
    """What a step reads of one parameter."""

    grad: Any
    mu: Any
    nu: Any
    param: Any  # None if the step moves no weights
    master: Any  # None if there is none


class Numbers(NamedTuple):
    """Scalars of one step."""

    decays: tuple[Any, Any]  # of the moments
    shares: tuple[Any, Any]  # of the new gradient in them: 1 - decay, not rounded in between
    corrections: tuple[Any, Any]  # of the moments' bias
    eps: Any
    rate: Any  # None if the step moves no weights
    weight_decay: Any


class Moved(NamedTuple):
    """A step along one parameter, float32 of its shape, nothing rounded yet."""

    mu: jax.Array
    nu: jax.Array
    update: jax.Array  # to add to the weight; the direction if the step moves no weights
    weight: Any  # the new weight, or None


# Where weight decay goes: nowhere, into the gradient (L2) or into the update (AdamW).
NO_DECAY, L2, DECOUPLED = "no", "L2", "decoupled"


def moments(leaf: Leaf, numbers: Numbers, decay: str) -> tuple[jax.Array, jax.Array]:
    """The new moments, float32, not rounded."""
    g = value(leaf.grad).astype(jnp.float32)
    if decay == L2:
        g = g + numbers.weight_decay * _weight(leaf)
    m = numbers.decays[0] * value(leaf.mu) + numbers.shares[0] * g
    v = numbers.decays[1] * value(leaf.nu) + numbers.shares[1] * jnp.square(g)
    return m, v


def moved(leaf: Leaf, numbers: Numbers, decay: str, new_moments: Any = None) -> Moved:
    """The step, whose new moments may be known already."""
    m, v = moments(leaf, numbers, decay) if new_moments is None else new_moments
    root = jnp.sqrt(v) / jnp.sqrt(numbers.corrections[1])
    direction = m / numbers.corrections[0] / (root + numbers.eps)
    if leaf.param is None:
        return Moved(m, v, direction, None)
    w = _weight(leaf)
    if decay == DECOUPLED:
        direction = direction + numbers.weight_decay * w
    update = -numbers.rate * direction
    return Moved(m, v, update, w + update)


def _weight(leaf: Leaf) -> jax.Array:
    """The most exact one there is."""
    return value(leaf.param if leaf.master is None else leaf.master).astype(jnp.float32)


def to_round(leaf: Leaf) -> list[Any]:
    """What of a leaf is rounded, in the order of its scales; None where only its finiteness is asked."""
    scaled = [kept for kept in (leaf.mu, leaf.nu, leaf.param, leaf.master) if is_scaled(kept)]
    # A step is finite if the second moment and the weight are.
    return scaled if is_scaled(leaf.nu) and is_scaled(leaf.param) else [*scaled, None]


def before_rounding(new: Moved, leaf: Leaf) -> list[jax.Array]:
    """The float32 tensors whose amaxes the scales of `to_round` come from."""
    pairs = ((new.mu, leaf.mu), (new.nu, leaf.nu), (new.weight, leaf.param), (new.weight, leaf.master))
    scaled = [tensor for tensor, kept in pairs if is_scaled(kept)]
    return scaled if len(scaled) == len(to_round(leaf)) else [*scaled, new.nu + jnp.abs(new.update)]


def rounded(new: Moved, leaf: Leaf, scales: list[jax.Array]) -> Leaf:
    """The new moments, weight and master in their formats; no weight if it is not scaled."""
    rest = iter(scales)

    def keep(tensor: jax.Array, kept: Any) -> Any:
        return quantize(tensor, format_of(kept), next(rest)) if is_scaled(kept) else tensor

    mu, nu, weight, master = keep(new.mu, leaf.mu), keep(new.nu, leaf.nu), None, None
    if is_scaled(leaf.param):
        scale, weight = next(rest), new.weight
        if leaf.master is not None:
            # The weight comes from the master as it is kept, so that it can be recomputed from it.
            master = keep(new.weight, leaf.master)
            weight = value(master)
        weight = quantize(weight, format_of(leaf.param), scale)
    return Leaf(None, mu, nu, weight, master)
