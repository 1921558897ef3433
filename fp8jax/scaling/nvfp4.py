"""NVFP4: block scaling with E2M1 codes, and the options of `Recipe.fp4_options`.

Beside the E4M3 scales of blocks there is a float32 scale of the tensor. The state is for the random bits of
output gradients, and of "eden":

    key    # shape=(2,), float32: see `fp8jax.scaling.seeds`

The bits depend on the key, the entry's place and the tensor's amax.

References:
    TransformerEngine 2.20 `NVFP4BlockScaling`; see `fp8jax.quantization.blocks` and `fp8jax.scaling.eden`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt32

from fp8jax.quantization import (
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
    ScaledArray,
    amax,
    leaf_seeds,
    quantize_rows_and_columns_fp4,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling import eden
from fp8jax.scaling.base import GRAD, KEY, RHS, KernelMatrix, State
from fp8jax.scaling.block import BlockScaling, transposes


def method_of(recipe: Recipe, operand: int, use: int) -> BlockMethod:
    """How an operand is quantized, a `fp8jax.scaling.block.MethodOf`.

    "46" is for codes that are rounded to nearest: to choose the scale with the smaller error would give
    stochastic rounding a bias (arXiv 2601.22813, section 4.2).
    """
    options = recipe.fp4_options
    if "eden" in options and (use == 1 or operand == GRAD):
        return eden.EDEN
    method = NVFP4_16X16 if operand == RHS and "2d" in options else NVFP4_1X16
    is_nearest = operand != GRAD or "stochastic" not in options
    return method.with_rule("four_or_six") if "46" in options and is_nearest else method


@dataclasses.dataclass(frozen=True)
class NVFP4Scaling(BlockScaling):
    """Block scaling with a scale of the tensor and random bits."""

    @property
    def rows_multiple(self) -> None:
        """None: the scale of the tensor is for all rows."""
        return None

    @property
    def note(self) -> str:
        """See `Scaling`; the Pallas kernels lack some options."""
        others = {"46", "eden"} & {*self.recipe.fp4_options}
        if not others:
            return ""
        return f"{' and '.join(sorted(others))}: on a GPU XLA quantizes, not the Pallas kernel"

    @property
    def takes_computed(self) -> bool:
        """See `Scaling`."""
        return False

    def init(self) -> State:
        """See `Scaling`."""
        has_random = {"stochastic", "eden"} & {*self.recipe.fp4_options}
        return {KEY: jnp.zeros(2, jnp.float32)} if has_random else {}

    def _whole_amax(self, kernel: KernelMatrix, part: Array) -> Array:
        return kernel.common_amax(amax(part, (*part.shape[:-2], 1, 1)))

    def _shard_of_blocks(self, rhs: Any, kernel: KernelMatrix, use: int) -> Any:
        is_eden = self.method(RHS, use).rule == "eden"  # the rotation needs all entries
        return None if is_eden else super()._shard_of_blocks(rhs, kernel, use)

    def update(self, state: State, seen: Array) -> State:
        """See `Scaling`."""
        del seen
        return {KEY: state[KEY].at[..., 1].add(1)} if KEY in state else {}

    def quantize_operand(
        self,
        operand: int,
        x: Any,
        state: State,
        gemms: tuple[int, ...] = (0, 1),
        whole_amax: Float32[Array, "..."] | None = None,
    ) -> tuple[ScaledArray, ...]:
        """See `BlockScaling`."""
        is_eden = [self.method(operand, gemm).rule == "eden" for gemm in gemms]
        if any(is_eden):
            others = tuple(gemm for gemm, is_its in zip(gemms, is_eden, strict=True) if not is_its)
            plain = iter(self.quantize_operand(operand, x, state, others, whole_amax) if others else ())
            return tuple(
                eden.quantize_operand(operand, x, gemm, state) if is_its else next(plain)
                for gemm, is_its in zip(gemms, is_eden, strict=True)
            )
        return quantize_rows_and_columns_fp4(
            x,
            state.get(KEY) if operand == GRAD else None,
            self.method(operand),
            transposes(operand, gemms),
            transform=operand != RHS and "hadamard" in self.recipe.fp4_options,
            seeds=_seeds,
            whole_amax=whole_amax,
        )


def _seeds(key: Float32[Array, "2"], amax: Float32[Array, ""]) -> UInt32[Array, "2"]:
    """The seeds of the random bits of a gradient as it is, and of its transpose."""
    of_tensor = lax.bitcast_convert_type(amax, jnp.uint32)
    return leaf_seeds(jnp.stack([key[0].astype(jnp.uint32), of_tensor]), key[1].astype(jnp.int32), 2)
