"""Conversion between the scaling states of TransformerEngine's modules and of fp8jax.

    te_state = to_te(variables["_overwrite_with_gradient"])
    state = from_te(te_state, "te")

TransformerEngine's scale is the reciprocal of fp8jax's, and its amax history has the opposite order. The
conversion does not need TransformerEngine to be installed.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from fp8jax.quantization import MAX_SCALE, MIN_SCALE, UNSET, usable
from fp8jax.recipe import Recipe
from fp8jax.scaling import of_recipe

# TransformerEngine's names of lhs, rhs and the output gradient.
_OPERANDS = ("x", "kernel", "grad")

# The name of the module from `make_dot_general_cls` in a layer.
_WRAPPER = "TEWrapper_dot_general_0"


def to_te(state: Mapping[str, Any], *, name: str = _WRAPPER) -> dict[str, Any]:
    """Converts fp8jax's scaling state to TransformerEngine's.

    TransformerEngine's scale is the reciprocal of fp8jax's. Its history starts with an empty entry, followed
    by the amaxes, oldest first. fp8jax's oldest amax is dropped, because no later scale depends on it.

    Args:
        state: the state of one dot, or a tree of states: a collection "_overwrite_with_gradient". Arrays may
            have leading axes, as under `nn.scan`.
        name: the submodule of a layer that has the dot's state: by default the one that
            `make_dot_general_cls` creates; "" if the layer itself has the state, as TransformerEngine's
            `DenseGeneral` in "fp8_metas".

    Returns:
        For each dot `{x,kernel,grad}_scale`, shape=(..., 1), and `{x,kernel,grad}_amax_history`,
        shape=(..., history). An unset scale becomes 1.

    Raises:
        ValueError: the state is not one of delayed scaling with interval 1.
    """
    if not state:
        return {}
    if "amax_history" in state:
        return _entry_to_te(state)
    _expect_tree(state, "scale and amax_history")
    moved = {}
    for key, below in state.items():
        if "amax_history" not in below:
            moved[key] = to_te(below, name=name)
        elif name:
            moved[name] = to_te(below)
        else:
            moved.update(to_te(below))
    return moved


def _entry_to_te(state: Mapping[str, Any]) -> dict[str, Any]:
    if "step" in state:
        raise ValueError("`state`: TransformerEngine updates at every step; got a state with interval > 1.")
    scale, history = state["scale"], state["amax_history"]
    factor = jnp.where(scale == UNSET, 1.0, 1 / scale)
    empty = jnp.zeros_like(history[..., :1])
    history = jnp.concatenate([empty, history[..., -2::-1]], axis=-1)[..., : history.shape[-1]]
    return {
        f"{operand}_{field}": value
        for i, operand in enumerate(_OPERANDS)
        for field, value in (("scale", factor[..., i : i + 1]), ("amax_history", history[..., i, :]))
    }


def from_te(state: Mapping[str, Any], recipe: Recipe | str, *, name: str = "kernel") -> dict[str, Any]:
    """Converts TransformerEngine's scaling state to fp8jax's; the inverse of `to_te`.

    A scale that is not finite becomes the first scale, an amax that is not finite becomes 0.

    Args:
        state: the state of one dot, or a tree of states: TransformerEngine's collection
            "_overwrite_with_gradient" or "fp8_metas".
        recipe: the model's recipe, or its text.
        name: the name of a dot's state in a layer: "kernel" in a model of `fp8jax.transform`.

    Returns:
        For each dot `scale`, shape=(..., 3), `amax_history`, shape=(..., 3, history), and the initial values
        of the recipe's other state, as from `fp8jax.dot.init_state`.

    Raises:
        ValueError: the state is not one of TransformerEngine's delayed scaling, or its history length is not
            the recipe's.
    """
    recipe = Recipe.parse(recipe)
    if not state:
        return {}
    if "x_scale" in state:
        return _entry_from_te(state, recipe)
    _expect_tree(state, "x_scale, x_amax_history and those of kernel and grad")
    moved = {}
    for key, below in state.items():
        converted = from_te(below, recipe, name=name)
        if "x_scale" not in below:
            moved[key] = converted
        elif key.startswith("TEWrapper"):
            moved[name] = converted
        else:
            moved[key] = {name: converted}
    return moved


def _entry_from_te(state: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    factor = jnp.concatenate([state[f"{operand}_scale"] for operand in _OPERANDS], axis=-1)
    history = jnp.stack([state[f"{operand}_amax_history"] for operand in _OPERANDS], axis=-2)
    if recipe.scaling != "delayed" or history.shape[-1] != recipe.amax_history_len:
        raise ValueError(
            f"`recipe`: expected scaling=delayed with amax_history_len={history.shape[-1]}, as the "
            f"state has; got {recipe}."
        )
    layers, first = history.shape[:-2], of_recipe(recipe).init()
    scale, history = 1 / factor, jnp.where(usable(history), history, 0.0)
    oldest = jnp.zeros_like(history[..., :1])
    return {name: jnp.broadcast_to(x, (*layers, *x.shape)) for name, x in first.items()} | {
        "scale": jnp.where(usable(scale), jnp.clip(scale, MIN_SCALE, MAX_SCALE), first["scale"]),
        "amax_history": jnp.concatenate([history[..., :0:-1], oldest], axis=-1),
    }


def _expect_tree(state: Mapping[str, Any], expected: str) -> None:
    wrong = [key for key, below in state.items() if not isinstance(below, Mapping)]
    if wrong:
        raise ValueError(f"`state`: expected {expected} of delayed scaling; got {', '.join(wrong)}.")
