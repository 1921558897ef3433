"""TransformerEngine's own modules under an fp8jax recipe, and conversion of their scaling state.

    recipe_of("te,margin=1")                  # a TransformerEngine DelayedScaling
    with autocast("te"): ...                  # TransformerEngine's modules in FP8
    nn.Dense(64, dot_general_cls=dot_general_cls("te"))
    te_state = to_te(variables["_overwrite_with_gradient"])
    state = from_te(te_state, "te")

The modules use only the recipe's GEMM column. GEMM options that they do not support raise.

TransformerEngine's scale is the reciprocal of fp8jax's, and its amax history has the opposite order. The
conversion does not need TransformerEngine to be installed.
"""

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp

from fp8jax.quantization import MAX_SCALE, MIN_SCALE, UNSET, usable
from fp8jax.recipe import Recipe
from fp8jax.scaling import of_recipe

# For each scaling that the modules have, TransformerEngine's recipe, and its options that are fields of ours.
_RECIPES = {
    "delayed": ("DelayedScaling", ("margin", "amax_history_len", "amax_compute_algo")),
    "current": ("Float8CurrentScaling", ()),
}


def recipe_of(recipe: Recipe | str) -> Any:
    """TransformerEngine's recipe object for the recipe's GEMM column.

    Args:
        recipe: a `Recipe`, or its text. Other columns are ignored, because TransformerEngine's modules have
            high-precision weights, gradients and moments. `first_scale` is ignored, too: the modules start
            with scale 1, so the first step differs.

    Returns:
        A `transformer_engine.common.recipe.DelayedScaling` or `Float8CurrentScaling`.

    Raises:
        ValueError: TransformerEngine's JAX modules do not support an option of the recipe.
        ImportError: TransformerEngine is not installed.
    """
    recipe = Recipe.parse(recipe)
    _refuse(recipe, "gemm", recipe.gemm == "FP8")
    _refuse(recipe, "scaling", recipe.scaling in _RECIPES)
    _refuse(recipe, "interval", recipe.interval == 1)
    _refuse(recipe, "override_linear_precision", not any(recipe.override_linear_precision))
    name, fields = _RECIPES[recipe.scaling]
    _refuse(recipe, "margin", "margin" in fields or recipe.margin == 0, f", with scaling={recipe.scaling}")
    theirs = importlib.import_module("transformer_engine.common.recipe")
    options = {field: getattr(recipe, field) for field in fields}
    return getattr(theirs, name)(fp8_format=theirs.Format[recipe.fp8_format], **options)


def _refuse(recipe: Recipe, field: str, fits: bool, where: str = "") -> None:
    if not fits:
        raise ValueError(
            f"`recipe`: TransformerEngine's JAX modules have no {field}={getattr(recipe, field)}{where}. "
            "Under `fp8jax.transform` its GEMMs can be used with any recipe."
        )


def autocast(recipe: Recipe | str, mesh_resource: Any = None) -> AbstractContextManager[None]:
    """A context in which TransformerEngine's own modules run in FP8.

    Args:
        recipe: see `recipe_of`.
        mesh_resource: TransformerEngine's `MeshResource`, for several devices.

    Raises: see `recipe_of`.
    """
    te_recipe = recipe_of(recipe)
    te = importlib.import_module("transformer_engine.jax")
    mesh_resource = te.MeshResource() if mesh_resource is None else mesh_resource
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=te_recipe, mesh_resource=mesh_resource)
    return te.fp8_autocast(enabled=True, fp8_recipe=te_recipe, mesh_resource=mesh_resource)


def dot_general_cls(recipe: Recipe | str) -> Any:
    """TransformerEngine's class for `nn.Dense(dot_general_cls=...)`, with TransformerEngine's scaling state.

    Args:
        recipe: see `recipe_of`.

    Raises: see `recipe_of`.
    """
    te_recipe = recipe_of(recipe)
    return importlib.import_module("transformer_engine.jax.flax").make_dot_general_cls(te_recipe)


# Conversion of scaling state ######################################################################

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
