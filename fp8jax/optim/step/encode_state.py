"""Encodes the new state of one parameter: codes on new scales, a remainder, or the update of a plain one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.optim.guard.replace_update import ReplaceUpdate, spoilt_scale
from fp8jax.optim.step import codecs
from fp8jax.optim.step.arithmetic import AdamScalars, AdamStep, ParamState
from fp8jax.optim.step.codecs import decode, scaled_part
from fp8jax.optim.step.scales import STORED
from fp8jax.optim.step.weight_rounding import encode_plain, encode_weight, is_rounded
from fp8jax.quantization import is_scaled, value


class Written(NamedTuple):
    """The result of one parameter's step, in storage formats."""

    update: Any
    mu: Any
    nu: Any
    master: Any
    remainder: Any


class Rounding(NamedTuple):
    """How the step rounds, see `fp8jax.optim.step`. The second moment is rounded as its storage says."""

    first_moment: str = "nearest"
    weight: str = "nearest"


def as_written(states: list[ParamState], scalars: AdamScalars, seeds: Any) -> tuple[list[Written], jax.Array]:
    """A result with the shapes of `fused_adam`'s and the shardings of the states."""
    del scalars, seeds
    new = []
    for state in states:
        moves = state.grad if state.param is None else state.param
        update = ReplaceUpdate.by(moves) if is_scaled(state.param) else value(moves)
        new.append(Written(update, state.mu, state.nu, state.master, state.remainder))
    return new, jnp.array(True)


def encode_state(
    state: ParamState,
    step: AdamStep,
    scales: list[jax.Array],
    stored_scales: list[jax.Array],
    maxima: list[Any],
    ok: jax.Array,
    is_lost: Any,
    random: Any,
    rounding: Rounding,
    weight_again: Any = None,
) -> Written:
    """Encodes the new state of one parameter.

    Args:
        state: the old state.
        step: the result of `adam_step`.
        scales: the new scales of the `quantized_arrays`.
        stored_scales: the scales to store: `scales` if `ok`, else the old scales.
        maxima: the absmax of the moments' 8-bit blocks.
        ok: whether the step is taken.
        is_lost: whether to spoil the parameter's scale, or a plain parameter; None for no.
        random: bits for the first moment, the weight and the second moment; Nones round to nearest.
        rounding: how the first moment and the weight are rounded.
        weight_again: the weight of `step`, computed again for the remainder; None takes the weight of `step`.
    """
    names = [name for name in STORED if scaled_part(getattr(state, name)) is not None]
    new, to_store = (dict(zip(names, all_of, strict=False)) for all_of in (scales, stored_scales))
    if is_lost is not None and "param" in to_store:
        to_store["param"] = jnp.where(is_lost, spoilt_scale(state.param.scale), to_store["param"])
    of_mu = random[0] if rounding.first_moment == "stochastic" else None

    def stored(name: str, encoded: Any) -> Any:
        chosen = codecs.select(ok, encoded, getattr(state, name))
        return codecs.with_scale(chosen, to_store[name]) if name in names else chosen

    mu = stored("mu", codecs.encode(step.mu, state.mu, new.get("mu", maxima[0]), of_mu))
    of_nu = random[2] if getattr(state.nu, "is_stochastic", False) else None
    nu = stored("nu", codecs.encode(step.nu, state.nu, new.get("nu", maxima[1]), of_nu))
    if not is_scaled(state.param):
        update, remainder = _of_plain(state, step, ok, is_lost, random[1], rounding.weight)
        return Written(update, mu, nu, None, remainder)
    name = "param" if state.master is None else "master"
    weight, remainder = encode_weight(
        step.weight,
        getattr(state, name),
        new.get(name),
        state.remainder,
        rounding=rounding.weight,
        random=random[1],
        again=weight_again,
    )
    remainder = None if remainder is None else codecs.select(ok, remainder, state.remainder)
    if state.master is None:
        return Written(ReplaceUpdate.by(stored("param", weight)), mu, nu, None, remainder)
    # From the stored master weight, so that a checkpoint of master weights gives the same weight.
    param = codecs.encode(decode(weight), state.param, new["param"])
    return Written(ReplaceUpdate.by(stored("param", param)), mu, nu, stored("master", weight), remainder)


def _of_plain(
    state: ParamState, step: AdamStep, ok: jax.Array, is_lost: Any, random: Any, rounding: str
) -> tuple[jax.Array, Any]:
    """The update to add to a plain parameter, and its new remainder."""
    update, remainder = step.update, None
    if is_rounded(state.param, rounding):
        update, remainder = encode_plain(step.weight, state.param, rounding=rounding, random=random)
    # -0, because XLA would merge 0 with the zeros that a scan's gradients start from, and store them.
    update = jnp.where(ok, update, -0.0)
    if is_lost is not None and is_scaled(state.grad):
        update = jnp.where(is_lost, jnp.nan, update)
    return update, None if remainder is None else codecs.select(ok, remainder, state.remainder)
