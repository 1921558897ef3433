"""FP8 for any JAX function: its jaxpr is evaluated with FP8 dot products.

    model = transform(fn, recipe)                   # fn(params, *args), from any framework
    variables = model.init(params, *args)           # kernels in the recipe's format, and scaling states
    y = model.apply(variables, *args)

`find_dots` follows each parameter through the function's jaxpr to its dot products. `choose` gives each dot
product a recipe. `evaluate` runs the jaxpr with those dot products in FP8. The function itself sees plain
arrays.
"""

from fp8jax.rewrite.call import has_plain_parameters as has_plain_parameters
from fp8jax.rewrite.call import plain_parameters as plain_parameters
from fp8jax.rewrite.choose import SMALLEST as SMALLEST
from fp8jax.rewrite.function import FunctionModel as FunctionModel
from fp8jax.rewrite.function import check_like as check_like
from fp8jax.rewrite.interpreter.evaluate import evaluate as evaluate
from fp8jax.rewrite.interpreter.find import FoundDots as FoundDots
from fp8jax.rewrite.interpreter.find import Uses as Uses
from fp8jax.rewrite.interpreter.find import find_dots as find_dots
from fp8jax.rewrite.interpreter.param_view import ParamView as ParamView
from fp8jax.rewrite.interpreter.param_view import Tracked as Tracked
from fp8jax.rewrite.interpreter.param_view import aval_of as aval_of
from fp8jax.rewrite.interpreter.param_view import can_be_kernel as can_be_kernel
from fp8jax.rewrite.interpreter.param_view import names_of as names_of
from fp8jax.rewrite.lora import LoRA as LoRA
from fp8jax.rewrite.patterns import Layer as Layer
from fp8jax.rewrite.patterns import layer_path as layer_path
from fp8jax.rewrite.plan import Kernel as Kernel
from fp8jax.rewrite.plan import Plan as Plan
from fp8jax.rewrite.remat import checkpointing as checkpointing
from fp8jax.rewrite.report import Report as Report
from fp8jax.rewrite.rules import Rule as Rule
from fp8jax.rewrite.traced_function import Annotations as Annotations
from fp8jax.rewrite.traced_function import Settings as Settings
from fp8jax.rewrite.traced_function import StaticTree as StaticTree
from fp8jax.rewrite.traced_function import live_jaxpr as live_jaxpr
