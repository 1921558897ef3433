"""FP8 for any JAX function: its jaxpr is evaluated with FP8 dot products.

    model = transform(fn, recipe)                   # fn(params, *args), from any framework
    variables = model.init(params, *args)           # kernels in the recipe's format, and scaling states
    y = model.apply(variables, *args)

`plan` follows each parameter through the function's jaxpr to its dot products. `evaluate` runs the jaxpr with
those dot products in FP8. The function itself sees plain arrays.
"""

from fp8jax.rewrite.blocks import checkpointing as checkpointing
from fp8jax.rewrite.call import plain_parameters as plain_parameters
from fp8jax.rewrite.choose import SMALLEST as SMALLEST
from fp8jax.rewrite.choose import Kernel as Kernel
from fp8jax.rewrite.choose import is_wide as is_wide
from fp8jax.rewrite.complaints import check_like as check_like
from fp8jax.rewrite.evaluate import Context as Context
from fp8jax.rewrite.evaluate import evaluate as evaluate
from fp8jax.rewrite.follow import Tracked as Tracked
from fp8jax.rewrite.follow import Way as Way
from fp8jax.rewrite.function import FunctionModel as FunctionModel
from fp8jax.rewrite.lora import LoRA as LoRA
from fp8jax.rewrite.plan import Plan as Plan
from fp8jax.rewrite.plan import Uses as Uses
from fp8jax.rewrite.plan import find as find
from fp8jax.rewrite.program import Annotations as Annotations
from fp8jax.rewrite.program import Settings as Settings
from fp8jax.rewrite.program import aval_of as aval_of
from fp8jax.rewrite.program import is_array as is_array
from fp8jax.rewrite.program import is_followed as is_followed
from fp8jax.rewrite.program import names_of as names_of
from fp8jax.rewrite.report import Report as Report
from fp8jax.rewrite.rules import Layer as Layer
from fp8jax.rewrite.rules import Rule as Rule
