"""Scaling by tensor: one scale for a tensor, chosen by a `ScaleMethod`, and the same codes for both GEMMs.

The residuals are codes: those of lhs, and those of the kernel or of this device's shard of it. Rows that are
sorted by group have a scale for each group.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fp8jax import formats
from fp8jax.platforms import gpu_barrier
from fp8jax.quantization import ScaledArray, amax, as_bytes, on_data, quantize_by, value
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import (
    CASTS,
    GRAD,
    LHS,
    OPERANDS,
    RHS,
    KernelMatrix,
    QuantizedRows,
    ScaleMethod,
    Scaling,
    State,
    Uses,
    groups_of_rows,
)


@dataclasses.dataclass(frozen=True)
class TensorScaling(Scaling):
    """Scaling by tensor; see `fp8jax.scaling.base.Scaling` for the methods."""

    build: Callable[[Recipe], ScaleMethod]  # `delayed.build` or `current.build`
    recipe: Recipe
    axes: ClassVar[tuple[tuple[str, str], ...]] = (("mk", "mk"), ("kn", "kn"), ("mn", "mn"))
    is_residual_quantized: ClassVar[bool] = True

    @property
    def granularity(self) -> str:
        """See `Scaling`."""
        return "tensor"

    @property
    def scales(self) -> str:
        """See `Scaling`."""
        return "tensor, history" if "amax_history" in self.init() else "tensor"

    @property
    def rows_multiple(self) -> int:
        """See `Scaling`."""
        return 1

    @property
    def method(self) -> ScaleMethod:
        """How scales are computed."""
        return self.build(self.recipe)

    def init(self) -> State:
        """See `Scaling`."""
        return self.method.init(len(OPERANDS))

    def format(self, operand: int) -> formats.Format:
        """See `Scaling`."""
        return formats.get(self.recipe.gemm_formats[operand == GRAD])

    def quantize(self, state: State, operand: int, x: Array, uses: Uses) -> tuple[tuple[Any, Any], Array]:
        """See `Scaling`."""
        # The state needs the amax, also where no GEMM needs the codes.
        del uses
        seen = amax(x)
        q = self._cast(state, operand, x, seen)
        return (q, q), seen

    def _cast(self, state: State, operand: int, x: Any, seen: Array) -> ScaledArray:
        format = self.format(operand)
        scale = self.method.scale(state, operand, seen, format.max)
        with jax.named_scope(CASTS[operand]):
            q = quantize_by(x, format, scale)
        return _finished(operand, q, seen)

    def quantize_rows(self, state: State, operand: int, x: Array, sizes: Array, uses: Uses) -> QuantizedRows:
        """See `Scaling`."""
        del uses
        groups, format = sizes.shape[0], self.format(operand)
        group = groups_of_rows(sizes, x.shape[0])
        # Rows past the last group are dropped; a group without rows has amax 0.
        of_rows = amax(x, (x.shape[0], 1)).reshape(-1)
        seen = jnp.zeros(groups, jnp.float32).at[group].max(of_rows, mode="drop")
        scale = jax.vmap(lambda state, amax: self.method.scale(state, operand, amax, format.max))(state, seen)
        with jax.named_scope(CASTS[operand]):
            of_row = jnp.take(scale, group, mode="clip")[:, None]
            q = ScaledArray(quantize_by(x, format, of_row).data, scale)
        q = _finished(operand, q, seen)
        return QuantizedRows(q, q, seen, sizes)

    def prepare(self, state: State, rhs: Any, kernel: KernelMatrix, groups: int) -> tuple[Any, Array]:
        """A kernel with one scale and codes in the GEMM's format is not quantized again."""
        if groups:
            has_scales = isinstance(rhs, ScaledArray) and rhs.scale.shape[:1] == rhs.shape[:1]
            one = lambda rhs, state: self.prepare(state, rhs, kernel, 0)  # noqa: E731
            return jax.vmap(one)(rhs if has_scales else value(rhs), state)
        format = self.format(RHS)
        if isinstance(rhs, ScaledArray) and rhs.data.dtype == format.dtype and rhs.scale.size == 1:
            scale = rhs.scale.reshape(()).astype(jnp.float32)
            return as_bytes(ScaledArray(rhs.data, scale)), scale * format.max  # an upper bound of the amax
        seen = kernel.common_amax(amax(rhs))
        return self._cast(state, RHS, rhs, seen), seen

    def kernel(self, state: State, residual: Any, kernel: KernelMatrix, use: int) -> ScaledArray:
        """See `Scaling`."""
        del state, use
        return kernel.to_matrix(on_data(kernel.gathered, residual))

    def update(self, state: State, seen: Array) -> State:
        """See `Scaling`."""
        limits = jnp.array([self.format(operand).max for operand in (LHS, RHS, GRAD)], jnp.float32)
        return self.method.update(state, seen, limits)


def _finished(operand: int, q: ScaledArray, seen: Array) -> ScaledArray:
    """`q` as bytes, behind a barrier: XLA on GPU would store the high-precision tensor for the backward and
    cast it again.

    A cast saturates, so the codes of an output gradient that is not finite are finite; its scale becomes NaN.
    """
    q = gpu_barrier(as_bytes(q))
    return ScaledArray(q.data, jnp.where(seen < jnp.inf, q.scale, jnp.nan)) if operand == GRAD else q
