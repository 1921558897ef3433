"""Where does FP8 enter a model? `transform` gives a model to the file that knows its kind."""

from typing import Any

from fp8jax.models import linen
from fp8jax.recipe import Recipe


def transform(model: Any, recipe: Recipe | str, *, backend: str = "auto") -> Any:
    """The same model with the recipe's formats: same code, same parameter names.

    Args:
        model: a Flax Linen module, unbound. It is not changed.
        recipe: a `Recipe`, or the text of one (`Recipe.parse`).
        backend: who multiplies: "auto", "xla" or "reference" (slow and exact).

    Returns:
        A `fp8jax.models.linen.LinenModel` with the module's `init` and `apply`.

    Raises:
        TypeError: `model` is not a Linen module.
        ValueError: the recipe cannot be parsed, or asks for what this release lacks.
    """
    return linen.transform(model, Recipe.parse(recipe), backend)
