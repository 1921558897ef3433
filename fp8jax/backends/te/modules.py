"""TransformerEngine's own modules under an fp8jax recipe.

    recipe_of("te,margin=1")                  # a TransformerEngine DelayedScaling
    with autocast("te"): ...                  # TransformerEngine's modules in FP8
    nn.Dense(64, dot_general_cls=dot_general_cls("te"))

The modules use only the recipe's GEMM column. GEMM options that they do not support raise.
"""

import importlib
from contextlib import AbstractContextManager
from typing import Any

from fp8jax.recipe import Recipe

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
