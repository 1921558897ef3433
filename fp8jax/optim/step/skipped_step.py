"""Whether a step is skipped: a new moment or weight is infinite or NaN, or a gradient has lost its tag.

The amaxes of the new state tell. A skipped step leaves the state as it is, see `encode_state`, and is counted
in `AdamState.skipped`. A lost gradient also spoils the scales of the parameters, see `optim.guard`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.platforms import any_of
from fp8jax.quantization import ABSURD, NO_TAG, is_scaled


def fault_of(amaxes: jax.Array, scales: jax.Array, of_grads: np.ndarray, checks: np.ndarray) -> jax.Array:
    """0 if the step can be taken, 1 for inf or NaN, 2 if a gradient is lost: int32 of shape ().

    One reduction, because a GPU starts a kernel for each. See `places_of_old` for the indices.
    """
    n = len(amaxes)
    is_grad = np.arange(n + len(checks)) >= n
    seen = amaxes[np.concatenate([np.arange(n), checks])]
    fault = jnp.where(seen < jnp.inf, 0, 1)
    if len(of_grads):
        is_lost = (scales[np.concatenate([np.zeros(n, int), of_grads])] == NO_TAG) & ~(seen < ABSURD)
        fault = jnp.where(is_grad & is_lost, 2, fault)
    return jnp.max(fault)


def faults_by_tensor(grads: list[Any], amaxes: list[list[jax.Array]]) -> tuple[jax.Array, jax.Array | None]:
    """The fault of a step from each parameter's gradient and list of amaxes, on a CPU.

    Returns:
        Whether the step can be taken, a bool of shape (); and whether a gradient is lost, None if none has a
        scale.
    """
    largest = [jnp.max(amax) for found in amaxes for amax in found]
    ok = jnp.all(jnp.stack([jnp.zeros((), jnp.float32), *largest]) < jnp.inf)
    lost = [
        _is_lost(grad.scale, jnp.stack([*map(jnp.max, found)]))
        for grad, found in zip(grads, amaxes, strict=True)
        if is_scaled(grad)
    ]
    if not lost:
        return ok, None
    is_lost = any_of(lost)
    return ok & ~is_lost, is_lost


def _is_lost(scales: jax.Array, amaxes: jax.Array) -> jax.Array:
    """Whether a gradient on these scales lost its tag, and is not zero: its parameter's amaxes tell."""
    return jnp.any(scales == NO_TAG) & ~(jnp.max(amaxes) < ABSURD)
