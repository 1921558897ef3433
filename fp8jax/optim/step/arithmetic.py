"""The arithmetic of Adam and Muon for one parameter, in float32; Muon's orthogonalization is in bfloat16.

Muon's direction is the momentum of a matrix, orthogonalized by optax's Newton-Schulz iteration.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax import contrib

from fp8jax.optim.step.codecs import decode
from fp8jax.optim.step.weight_rounding import decode_weight
from fp8jax.quantization import value


class ParamState(NamedTuple):
    """The inputs of one parameter's step, in their storage formats."""

    grad: Any
    mu: Any
    nu: Any
    param: Any  # None without a learning rate
    master: Any  # None without a master weight
    remainder: Any = None  # what rounding took from the weight or its master; see `weight_rounding`
    direction: Any = None  # Muon's, see `directions`; None for a parameter that Adam updates


class MuonScalars(NamedTuple):
    """Scalars of one step of Muon, float32."""

    decay: Any  # beta
    share: Any  # 1 - beta
    nesterov: tuple[Any, Any]  # as in `AdamScalars`
    step_size: Any  # the negative learning rate
    weight_decay: Any


class AdamScalars(NamedTuple):
    """Scalars of one step, float32."""

    decays: tuple[Any, Any]  # b1, b2
    shares: tuple[Any, Any]  # 1 - b1, 1 - b2, computed in Python to round once
    corrections: tuple[Any, Any]  # 1 - b1**t, sqrt(1 - b2**t)
    eps: Any
    step_size: Any  # the negative learning rate; None without one
    weight_decay: Any
    nesterov: Any = None  # shares of the first moment and of the gradient in the direction; None: no gradient
    muon: Any = None  # `MuonScalars`, for parameters with a direction
    limit: Any = None  # `largest_update`; None if it is not known


class AdamStep(NamedTuple):
    """The result of one parameter's step: float32 arrays of its shape, before rounding."""

    mu: jax.Array
    nu: Any  # None for Muon
    update: jax.Array  # to add to the weight; the Adam direction without a learning rate
    weight: Any  # the new weight; None without a learning rate


# Weight decay: none, added to the gradient (L2) or to the update (AdamW).
NO_DECAY, L2, DECOUPLED = "no", "L2", "decoupled"


def adam_step(state: ParamState, scalars: AdamScalars, decay: str) -> AdamStep:
    """The new moments, the update and the new weight of one parameter.

    Args:
        state: the parameter's state, in any formats.
        scalars: the step's scalars.
        decay: `NO_DECAY`, `L2` or `DECOUPLED`.

    References:
        Adam, arXiv 1412.6980, algorithm 1; AdamW, arXiv 1711.05101, algorithm 2; Nesterov's momentum: optax's
        `scale_by_adam`.
    """
    weight = None
    if state.param is not None:
        weight = decode_weight(state.param if state.master is None else state.master, state.remainder)
    if state.direction is not None:
        return _muon_step(state, weight, scalars.muon, decay)
    g = decode(state.grad)
    if decay == L2:
        g = g + scalars.weight_decay * weight
    # In this order a compiler contracts to fma(1 - b1, g, b1 m), which moves fewer ties between E4M3 codes
    # away from MS-AMP's, where both products are rounded.
    m = scalars.shares[0] * g + scalars.decays[0] * decode(state.mu)
    v = scalars.decays[1] * decode(state.nu) + scalars.shares[1] * jnp.square(g)
    root = jnp.sqrt(v) / scalars.corrections[1]
    if scalars.nesterov is None:
        direction = m / scalars.corrections[0] / (root + scalars.eps)
    else:
        direction = (scalars.nesterov[0] * m + scalars.nesterov[1] * g) / (root + scalars.eps)
    if weight is None:
        return AdamStep(m, v, direction, None)
    if decay == DECOUPLED:
        direction = direction + scalars.weight_decay * weight
    update = scalars.step_size * direction
    return AdamStep(m, v, update, weight + update)


def nesterov_shares(decay: Any, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The shares of the first moment and of the gradient in step number `count` with Nesterov's momentum."""
    decay, steps = jnp.float32(decay), jnp.float32(count)
    return decay / (1 - decay ** (steps + 1)), (1 - decay) / (1 - decay**steps)


def largest_update(scalars: AdamScalars, eps: Any) -> jax.Array | None:
    """A bound of every update of a step whose second moment is finite, for weights up to 1e30: float32.

    The second moment bounds the gradients that it has seen, and so the first one.

    Args:
        scalars: those of the step.
        eps: as the user gave it.

    Returns:
        None if `eps` is not known while tracing, or so small that it bounds nothing.
    """
    if not isinstance(eps, int | float) or eps < 1e-12:
        return None
    gradient = math.sqrt(jnp.finfo(jnp.float32).max) / jnp.sqrt(scalars.shares[1])
    share = 1 / scalars.corrections[0] if scalars.nesterov is None else sum(scalars.nesterov)
    largest = gradient * share / eps + 1e30 * jnp.abs(scalars.weight_decay)
    return largest if scalars.step_size is None else jnp.abs(scalars.step_size) * largest


# Muon #############################################################################################

DTYPE = jnp.bfloat16  # of the Newton-Schulz iteration, as in Muon's reference

# Muon's (3.4445, -4.7750, 2.0315) as bfloat16 numbers with the same sum. The nearest bfloat16 numbers have
# another sum, and with them directions were 4% shorter.
COEFFICIENTS = 3.4375, -4.75, 2.015625


def momentum(state: ParamState, scalars: MuonScalars) -> jax.Array:
    """The new first moment of a parameter that Muon updates, float32."""
    return scalars.share * decode(state.grad) + scalars.decay * decode(state.mu)


def _muon_step(state: ParamState, weight: Any, scalars: MuonScalars, decay: str) -> AdamStep:
    direction = state.direction.astype(jnp.float32)
    if decay == DECOUPLED:
        direction = direction + scalars.weight_decay * weight
    update = scalars.step_size * direction
    return AdamStep(momentum(state, scalars), None, update, weight + update)


def directions(
    states: list[ParamState], scalars: MuonScalars, matrices: tuple[Any, ...], rms: Any
) -> list[Any]:
    """The direction of each parameter that Muon updates, bfloat16; None for the others.

    Args:
        states: the parameters' states.
        scalars: the step's scalars.
        matrices: `MuonDimensionNumbers` of tuples for each parameter, None for those of Adam.
        rms: the root mean square of a direction with all singular values 1; None for optax's default factor,
            the root of fan-out / fan-in if that is more than 1.
    """
    pairs = zip(states, matrices, strict=True)
    return [None if axes is None else _direction(state, scalars, axes, rms) for state, axes in pairs]


def as_directions(states: list[ParamState], scalars: MuonScalars, matrices: tuple[Any, ...]) -> list[Any]:
    """A result with the shapes of `directions` and the shardings of the gradients."""
    del scalars
    pairs = zip(states, matrices, strict=True)
    return [None if axes is None else value(state.grad).astype(DTYPE) for state, axes in pairs]


@functools.partial(jax.jit, static_argnums=2)  # so that equal tensors are traced once
def _direction(state: ParamState, scalars: MuonScalars, axes: Any, rms: Any) -> jax.Array:
    of_momentum, of_grad = scalars.nesterov
    nesterov = of_momentum * momentum(state, scalars) + of_grad * decode(state.grad)
    # With beta 0 optax's momentum is its input.
    tx = contrib.scale_by_muon(COEFFICIENTS, beta=0.0, nesterov=False, weight_dimension_numbers=axes)
    nesterov = nesterov.astype(DTYPE)
    direction: Any = tx.update(nesterov, tx.init(nesterov))[0]
    fan_in, fan_out = (math.prod(nesterov.shape[axis] for axis in each) for each in axes)
    factor = math.sqrt(max(1, fan_out / fan_in)) if rms is None else math.sqrt(max(fan_in, fan_out)) * rms
    return (direction * factor).astype(DTYPE)
