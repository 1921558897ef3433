"""Muon's directions: the momentum of each matrix, orthogonalized by optax's Newton-Schulz iteration."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from optax import contrib

from fp8jax.optim.step.arithmetic import MuonScalars, ParamState, momentum
from fp8jax.optim.step.codecs import decode
from fp8jax.quantization import value

DTYPE = jnp.bfloat16  # of the iteration, as in Muon's reference

# Muon's (3.4445, -4.7750, 2.0315) as bfloat16 numbers with the same sum. The nearest bfloat16 numbers have
# another sum, and with them directions were 4% shorter.
COEFFICIENTS = 3.4375, -4.75, 2.015625


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
