"""Recipes: the precision chart as a value, the legal values of its fields, and settings of other libraries.

Recipe.parse("O2,scaling=current")
Recipe.from_accelerate("config.yaml")         # Hugging Face Accelerate's settings
Recipe.from_te(DelayedScaling(margin=2))      # TransformerEngine's recipe objects
"""

from fp8jax.recipe.recipe import COMBINED as COMBINED
from fp8jax.recipe.recipe import DEFAULT_EXCLUDE as DEFAULT_EXCLUDE
from fp8jax.recipe.recipe import PRESETS as PRESETS
from fp8jax.recipe.recipe import Recipe as Recipe
from fp8jax.recipe.recipe import check_weights as check_weights
from fp8jax.recipe.recipe import parse_changes as parse_changes
