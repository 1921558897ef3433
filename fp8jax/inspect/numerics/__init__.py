"""Statistics of a model's tensors under its own recipe and under others, and advice from them.

| file | provides |
|---|---|
| `of_loss` | `statistics`: one call around a loss |
| `recorder`, `measures` | the plug-in of a dot that records, and what it measures |
| `of_step` | `step_statistics`: updates lost to rounding, and moments that underflow |
| `advice` | `advise`: the recipe, the layers to keep out of FP8, and why |
| `rows` | `Statistics`, `OperandRow`: the result, as a table and as JSON |
"""

from fp8jax.inspect.numerics.advice import Advice as Advice
from fp8jax.inspect.numerics.advice import advise as advise
from fp8jax.inspect.numerics.advice import recipe_for as recipe_for
from fp8jax.inspect.numerics.measures import OPERANDS as OPERANDS
from fp8jax.inspect.numerics.of_loss import RECIPES as RECIPES
from fp8jax.inspect.numerics.of_loss import statistics as statistics
from fp8jax.inspect.numerics.of_step import StepRow as StepRow
from fp8jax.inspect.numerics.of_step import step_statistics as step_statistics
from fp8jax.inspect.numerics.rows import OperandRow as OperandRow
from fp8jax.inspect.numerics.rows import Rows as Rows
from fp8jax.inspect.numerics.rows import Statistics as Statistics
from fp8jax.inspect.numerics.rows import load as load
from fp8jax.inspect.numerics.rows import load_run as load_run
