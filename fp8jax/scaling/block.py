"""Block scaling: scales are computed from the blocks of the tensor to cast.

    for_fprop, for_wgrad = of_recipe(recipe).quantize_operand(LHS, lhs, state)

A GEMM contracts the last axis of both operands, and blocks run along it. Each operand takes part in two GEMMs
that contract different axes, see `fp8jax.scaling.base`.

So an operand is quantized twice from high precision, as it is and transposed. Square blocks have the same
codes in both copies.

There is no state, but for the seeds of `fp8jax.scaling.nvfp4`.

References:
    TransformerEngine 2.20 `Float8BlockScaling`, `MXFP8BlockScaling`; see `fp8jax.quantization.blocks`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.platforms import gpu_barrier
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    BlockMethod,
    Computed,
    ScaledArray,
    as_bytes,
    quantize_rows_and_columns,
    value,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.base import (
    CASTS,
    GRAD,
    LHS,
    RHS,
    KernelMatrix,
    QuantizedRows,
    Scaling,
    State,
    Uses,
    in_aligned_groups,
)
from fp8jax.scaling.frozen_kernel import operand_of_stored, stored_kernel

# (recipe, operand, use) -> how an operand is quantized for its first GEMM (use 0) or its second one (1).
MethodOf = Callable[[Recipe, int, int], BlockMethod]


class InFP8(NamedTuple):
    """The methods of rhs and of other operands, whose formats are the recipe's; a `MethodOf`."""

    rhs: BlockMethod
    others: BlockMethod

    def __call__(self, recipe: Recipe, operand: int, use: int) -> BlockMethod:
        """See `MethodOf`."""
        del use
        format = formats.get(recipe.gemm_formats[operand == GRAD])
        return dataclasses.replace(self.rhs if operand == RHS else self.others, format=format)


BLOCK = InFP8(BLOCK_128X128, BLOCK_1X128)
BLOCK_FLOAT32 = InFP8(*(dataclasses.replace(method, scale="float32") for method in BLOCK))
BLOCK_OF_32 = InFP8(MXFP8, MXFP8)


@dataclasses.dataclass(frozen=True)
class BlockScaling(Scaling):
    """Block scaling; see `fp8jax.scaling.base.Scaling` for the methods.

    The residuals are lhs quantized for wgrad, and the kernel as it is stored: the backward quantizes it for
    dgrad. So no second copy of a kernel is in memory between forward and backward, and a sharded kernel is
    gathered again, as the codes and scales of dgrad.
    """

    method_of: MethodOf
    recipe: Recipe
    axes: ClassVar[tuple[tuple[str, str], ...]] = (("mk", "km"), ("nk", "kn"), ("mn", "nm"))
    is_residual_quantized: ClassVar[bool] = False

    def method(self, operand: int, use: int = 0) -> BlockMethod:
        """How an operand is quantized for its first GEMM (0) or its second one (1)."""
        return self.method_of(self.recipe, operand, use)

    @property
    def granularity(self) -> str:
        """The block of lhs; a kernel may have square blocks."""
        return "x".join(map(str, self.method(LHS).block))

    @property
    def scales(self) -> str:
        """See `Scaling`."""
        methods = [self.method(operand) for operand in (RHS, LHS, GRAD)]
        names = ["{}x{} ".format(*x.block) + x.scale_format for x in methods]
        return " / ".join(dict.fromkeys(names))

    @property
    def rows_multiple(self) -> int | None:
        """The scale blocks of wgrad run along rows."""
        return self.method(LHS).block[1]

    @property
    def kernel_method(self) -> BlockMethod:
        """See `Scaling`."""
        return self.method(RHS)

    @property
    def takes_computed(self) -> bool:
        """See `Scaling`."""
        return not any(self.recipe.override_linear_precision)

    def init(self) -> State:
        """See `Scaling`."""
        return {}

    def format(self, operand: int) -> Format:
        """See `Scaling`."""
        return self.method(operand).format

    def quantize(
        self, state: State, operand: int, x: Array | Computed, uses: Uses
    ) -> tuple[tuple[Any, Any], Array]:
        """See `Scaling`."""
        return self._copies(state, operand, x, uses), jnp.zeros(())

    def _copies(self, state: State, operand: int, x: Any, uses: Uses, whole_amax: Any = None) -> Any:
        """The copies behind a barrier: XLA on GPU would store the high-precision tensor."""
        gemms = tuple(gemm for gemm, is_used in enumerate(uses) if is_used)
        if not gemms:
            return None, None
        with jax.named_scope(CASTS[operand]):
            copies = self.quantize_operand(operand, x, state, gemms, whole_amax)
        made = dict(zip(gemms, gpu_barrier(tuple(map(as_bytes, copies))), strict=True))
        return made.get(0), made.get(1)

    def quantize_rows(self, state: State, operand: int, x: Array, sizes: Array, uses: Uses) -> QuantizedRows:
        """See `Scaling`."""
        multiple, seen = self.rows_multiple, jnp.zeros(sizes.shape)
        if multiple is None or not any(uses):
            return QuantizedRows(None, None, seen, sizes)
        padded, aligned = in_aligned_groups(x, sizes, multiple)
        first, second = self._copies(state, operand, padded, uses)
        return QuantizedRows(first, second, seen, aligned)

    def prepare(self, state: State, rhs: Any, kernel: KernelMatrix, groups: int) -> tuple[Any, Array]:
        """See `Scaling`."""
        del state, kernel
        return rhs, jnp.zeros((groups,) if groups else ())

    def kernel(self, state: State, residual: Any, kernel: KernelMatrix, use: int) -> ScaledArray:
        """A sharded kernel is quantized in shards, and all-gathered as codes and scales, if the shards have
        whole blocks and it is stored in more bytes. Then the result is the same to the bit."""
        rhs, uses = residual, (use == 0, use == 1)
        if isinstance(rhs, ScaledArray) and kernel.is_as_stored:
            stored = operand_of_stored(self.method(RHS), rhs, kernel.matrix[0], use)
            if stored is not None:
                return as_bytes(stored)
        shard = self._shard_of_blocks(rhs, kernel, use)
        if shard is None:
            whole = kernel.to_matrix(value(kernel.gathered(rhs)))
            return self._copies(state, RHS, whole, uses)[use]
        part = shard.side.to_matrix(value(rhs))
        q = self._copies(state, RHS, part, uses, self._whole_amax(kernel, part))[use]
        # The codes and the scales of blocks; a scale of the tensor is the same on all devices.
        leaves, treedef = jax.tree.flatten(q)
        leaves[:2] = kernel.gathered_runs(leaves[:2], _axis(shard, use), shard.runs)
        return treedef.unflatten(leaves)

    def _whole_amax(self, kernel: KernelMatrix, part: Array) -> Array | None:
        """The amax of the whole kernel, of which `part` is this device's shard, if its scales need it."""
        del kernel, part
        return None

    def _shard_of_blocks(self, rhs: Any, kernel: KernelMatrix, use: int) -> Any:
        """This device's shard of a kernel; None if not blocks of it are to be sent."""
        shard = kernel.shard()
        if shard is None:
            return None
        stored = rhs.data if isinstance(rhs, ScaledArray) else rhs
        is_smaller = 8 * stored.dtype.itemsize > self.method(RHS).format.bits
        is_whole = shard.axis > -3 and shard.length % self.method(RHS).block[_axis(shard, use)] == 0
        return shard if is_smaller and is_whole else None

    def stored(self, x: Array, layers: tuple[int, ...], inputs: int) -> ScaledArray | None:
        """See `frozen_kernel.stored_kernel`."""
        return stored_kernel(self.method(RHS), x, layers, inputs)

    def update(self, state: State, seen: Array) -> State:
        """See `Scaling`."""
        del state, seen
        return {}

    def quantize_operand(
        self,
        operand: int,
        x: Float[Array, "*batch rows columns"] | Computed,
        state: State,
        gemms: tuple[int, ...] = (0, 1),
        whole_amax: Float32[Array, "..."] | None = None,
    ) -> tuple[ScaledArray, ...]:
        """Operand number `operand` of a dot, quantized for its GEMMs.

        Args:
            operand: `LHS`, `RHS` or `GRAD`.
            x: the operand as a matrix: lhs (m, k), rhs (k, n), grad (m, n); `Computed` if the scaling
                `takes_computed`.
            state: the dot's state.
            gemms: for which GEMMs of the operand: 0 for the first one, 1 for the second one.
            whole_amax: see `quantize_blocks`.

        Returns:
            For each GEMM a copy with the contracted axis last, padded to whole blocks.
        """
        del state, whole_amax
        return quantize_rows_and_columns(x, self.method(operand), transposes(operand, gemms))


def _axis(shard: Any, use: int) -> int:
    """The sharded axis of a kernel's copy: the first GEMM's is transposed."""
    return shard.axis if use else -3 - shard.axis


def transposes(operand: int, gemms: tuple[int, ...]) -> tuple[bool, ...]:
    """For each GEMM whether the operand's copy is transposed, so that the contracted axis is last."""
    return tuple((gemm == 1) != (operand == RHS) for gemm in gemms)
