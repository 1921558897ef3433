"""The product of one layer's call: in FP8, or in a wider format.

A layer of Flax promotes its operands to one dtype and calls a `dot_general`. What stands here takes the
place of both: `operands` leaves a kernel in the format it is kept in, `dot_general` multiplies.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.contraction import einsum
from fp8jax.dot import Over, Weight, dot_general, ragged_dot
from fp8jax.models.moe import exchange
from fp8jax.platforms import explicit_mesh, with_sharding
from fp8jax.recipe import Recipe
from fp8jax.scaled import ScaledArray, value

# The name of a layer's product, before its bias, to a policy of `jax.checkpoint`.
PRODUCT = "fp8jax_product"

# Dtypes of GEMMs that are not FP8.
GEMM_DTYPES = {
    "FP16": jnp.dtype(jnp.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "FP32": jnp.dtype(jnp.float32),
}


class FP8Dot:
    """A product under a recipe.

    Args:
        recipe: which formats.
        backend: who multiplies.
        state: gives the scaling state; called when the layer multiplies.
        param_dtype: dtype that the layer's parameters have in its own code.

    Attributes:
        is_used: whether the layer multiplied with this; a subclass's own code may not.
    """

    def __init__(self, recipe: Recipe, backend: str, state: Callable[[], Any], param_dtype: Any):
        self.recipe, self.backend, self.state, self.param_dtype = recipe, backend, state, param_dtype
        self.out_dtype: Any = None
        self.is_used = False

    def operands(self, inputs: Any, kernel: Any, bias: Any, dtype: Any) -> tuple[Any, Any, Any]:
        """Leaves input and kernel as they are: casting to FP8 from what they are kept in
        rounds once. Notes the dtype that the layer computes in."""
        self.out_dtype = _compute_dtype(dtype, inputs, kernel, self.param_dtype, bias)
        inputs = jnp.asarray(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = inputs.astype(self.out_dtype)
        return inputs, kernel, _cast(bias, self.out_dtype)

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, out_sharding: Any = None, **ignored: Any
    ) -> Any:
        """`ignored` is the precision of a wider GEMM."""
        self.is_used = True
        out = dot_general(
            lhs,
            rhs,
            dimension_numbers,
            out_dtype=self.out_dtype,
            recipe=self.recipe,
            backend=self.backend,
            state=self.state(),
            out_sharding=out_sharding,
        )
        return checkpoint_name(out, PRODUCT)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, out_sharding: Any = None) -> Any:
        """`jnp.einsum` of subscripts that are one dot."""
        return einsum(subscripts, lhs, rhs, self.dot_general, out_sharding)

    def ragged_dot(self, lhs: Any, rhs: Any, group_sizes: Any, over: Over | None = None) -> Any:
        """`lax.ragged_dot`; the state is that of `dot.init_ragged_state`."""
        self.is_used = True
        options = {"out_dtype": self.out_dtype, "recipe": self.recipe, "backend": self.backend}
        return ragged_dot(lhs, rhs, group_sizes, state=self.state(), over=over, **options)


class WideDot:
    """A product in a wider format: operands cast to it, forward and backward."""

    def __init__(self, gemm_dtype: Any, param_dtype: Any):
        self.gemm_dtype, self.param_dtype = gemm_dtype, param_dtype
        self.out_dtype: Any = None

    def operands(self, inputs: Any, kernel: Any, bias: Any, dtype: Any) -> tuple[Any, Any, Any]:
        """Both cast, whatever the layer's dtype."""
        self.out_dtype = _compute_dtype(dtype, inputs, kernel, self.param_dtype, bias)
        inputs, kernel = (_cast(jnp.asarray(x), self.gemm_dtype) for x in (inputs, value(kernel)))
        return inputs, kernel, _cast(bias, self.out_dtype)

    def dot_general(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        out_sharding: Any = None,
        **ignored: Any,
    ) -> Any:
        """`lax.dot_general`, its output in the layer's dtype."""
        product = functools.partial(lax.dot_general, lhs, rhs, dimension_numbers, precision=precision)
        return self._sharded(product, out_sharding, lhs, rhs)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, out_sharding: Any = None) -> Any:
        """`jnp.einsum`, its output in the layer's dtype."""
        return self._sharded(functools.partial(jnp.einsum, subscripts, lhs, rhs), out_sharding, lhs, rhs)

    def ragged_dot(self, lhs: Any, rhs: Any, group_sizes: Any, over: Over | None = None) -> Any:
        """`lax.ragged_dot`, its output in the layer's dtype."""
        return exchange.ragged_dot(lhs, rhs, group_sizes, over).astype(self.out_dtype)

    def _sharded(self, product: Callable[..., Any], out_sharding: Any, *operands: Any) -> Any:
        if out_sharding is None or explicit_mesh(operands):
            out = product(out_sharding=out_sharding).astype(self.out_dtype)
        else:
            out = with_sharding(product().astype(self.out_dtype), out_sharding)
        return checkpoint_name(out, PRODUCT)


def _compute_dtype(dtype: Any, inputs: Any, kernel: Any, param_dtype: Any, bias: Any) -> Any:
    """What Flax computes in: `dtype`, or the promoted dtype of what takes part."""
    if dtype is not None:
        return jnp.dtype(dtype)
    kept = param_dtype if isinstance(kernel, ScaledArray | Weight) else kernel.dtype
    parts = [jnp.asarray(inputs).dtype, kept, *([] if bias is None else [bias.dtype])]
    promoted = jnp.result_type(*parts)
    return promoted if jnp.issubdtype(promoted, jnp.floating) else jnp.dtype(jnp.float32)


def _cast(x: Any, dtype: Any) -> Any:
    return None if x is None else x.astype(dtype)
