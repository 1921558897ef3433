"""The scaling state of TransformerEngine's modules and of ours, each made of the other.

    theirs = to_te(variables["_overwrite_with_gradient"])
    ours = from_te(theirs, "te")

Its scale is the factor to multiply with, the reciprocal of ours, and its history of amaxes runs the other
way. Here are names and arrays alone: TransformerEngine need not be installed.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from fp8jax.recipe import Recipe
from fp8jax.scaled import FIRST_SCALES, MAX_SCALE, MIN_SCALE, UNSET, usable

# Its names of a product's operands, in the order of ours.
_OPERANDS = ("x", "kernel", "grad")

# What `make_dot_general_cls` makes is called so within a layer.
_WRAPPER = "TEWrapper_dot_general_0"


def to_te(state: Mapping[str, Any], *, name: str = _WRAPPER) -> dict[str, Any]:
    """Our scaling state as TransformerEngine's modules keep it.

    Its scale is the factor to multiply with, the reciprocal of ours; its history is oldest first
    behind an empty place, without our oldest amax, which no later scale depends on.

    Args:
        state: that of one product, or a tree of them: a collection "_overwrite_with_gradient". Arrays
            may have axes in front, as under `nn.scan`.
        name: what holds a product's state within a layer: by default what `make_dot_general_cls`
            makes; "" where the layer itself does, as TransformerEngine's `DenseGeneral` in its
            collection "fp8_metas".

    Returns:
        For each product `{x,kernel,grad}_scale`, shape=(..., 1), and `{x,kernel,grad}_amax_history`,
        shape=(..., history). A scale that is not set yet is 1, and the scale of FP8 weight gradients
        is left out.

    Raises:
        ValueError: what is there is no state of delayed scaling that is updated at every step.
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
    """TransformerEngine's scaling state as ours: the inverse of `to_te`.

    A factor or an amax that is not finite says nothing: the scale is then as at the start, the amax 0.

    Args:
        state: that of one product, or a tree of them: TransformerEngine's collection
            "_overwrite_with_gradient" or "fp8_metas".
        recipe: the recipe that the state is for, or the text of one.
        name: what holds a product's state within a layer: "kernel" in a model of `fp8jax.transform`.

    Returns:
        For each product `scale`, shape=(..., 3), `amax_history`, shape=(..., 3, history), and what
        else the recipe keeps, as `fp8jax.init_state` gives it.

    Raises:
        ValueError: what is there is no state of TransformerEngine's delayed scaling, or its history is
            not as long as the recipe's.
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
    scale, first = 1 / factor, jnp.array(FIRST_SCALES[recipe.first_scale], jnp.float32)
    history = jnp.where(usable(history), history, 0.0)
    oldest = jnp.zeros_like(history[..., :1])
    new = {
        "scale": jnp.where(usable(scale), jnp.clip(scale, MIN_SCALE, MAX_SCALE), first),
        "amax_history": jnp.concatenate([history[..., :0:-1], oldest], axis=-1),
    }
    if recipe.interval > 1:
        new["step"] = jnp.zeros(history.shape[:-2], jnp.float32)
    if recipe.weight_grad == "E4M3":
        new["wgrad_scale"] = jnp.ones(history.shape[:-2], jnp.float32)
    return new


def _expect_tree(state: Mapping[str, Any], expected: str) -> None:
    wrong = [key for key, below in state.items() if not isinstance(below, Mapping)]
    if wrong:
        raise ValueError(f"`state`: expected {expected} of delayed scaling; got {', '.join(wrong)}.")
