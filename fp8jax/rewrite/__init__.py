"""FP8 for any JAX function: its jaxpr is evaluated with other dot products.

    model = transform(fn, recipe)                   # fn(params, *args), whatever framework wrote it
    variables = model.init(params, *args)           # kernels in the recipe's format, and scaling states
    y = model.apply(variables, *args)

`plan` follows each parameter through the function's jaxpr to the dot products that take it, `evaluate`
runs the jaxpr with those dot products in FP8. The function itself sees plain arrays.
"""

from fp8jax.rewrite.function import FunctionModel as FunctionModel
from fp8jax.rewrite.function import transform as transform
