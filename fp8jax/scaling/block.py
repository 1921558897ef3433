"""Block scaling: scales are computed from the blocks of the tensor to cast.

    for_fprop, for_wgrad = quantize_operand(of_recipe(recipe), LHS, lhs, state)

A GEMM contracts the last axis of both operands, and blocks run along it. Each operand takes part in two GEMMs
that contract different axes, see `fp8jax.scaling.base`.

So an operand is quantized twice from high precision, as it is and transposed. Square blocks have the same
codes in both copies.

Only "nvfp4" has a state, for the random bits of output gradients, and of "eden":

    key    # shape=(2,), float32: see `fp8jax.scaling.seeds`

The bits depend on the key, the entry's place and the tensor's amax.

References:
    TransformerEngine 2.20 `Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`; see
    `fp8jax.quantization.blocks`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.platforms import gpu_barrier
from fp8jax.quantization import (
    BLOCK_1X128,
    BLOCK_128X128,
    MXFP8,
    NVFP4_1X16,
    NVFP4_16X16,
    BlockMethod,
    Computed,
    ScaledArray,
    amax,
    as_bytes,
    leaf_seeds,
    quantize_rows_and_columns,
    quantize_rows_and_columns_fp4,
    value,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling import eden
from fp8jax.scaling.base import (
    CASTS,
    GRAD,
    KEY,
    LHS,
    RHS,
    KernelMatrix,
    QuantizedRows,
    Scaling,
    State,
    Uses,
)
from fp8jax.scaling.frozen_kernel import operand_of_stored, stored_kernel
from fp8jax.scaling.row_groups import in_aligned_groups

# `BlockMethod.scale` -> the format of stored scales, where the names differ.
_SCALE_FORMATS = {"power_of_two": "FP32", "float32": "FP32"}


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


def nvfp4(recipe: Recipe, operand: int, use: int) -> BlockMethod:
    """The method of NVFP4, a `MethodOf`.

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
        names = ["{}x{} ".format(*x.block) + _SCALE_FORMATS.get(x.scale, x.scale) for x in methods]
        return " / ".join(dict.fromkeys(names))

    @property
    def rows_multiple(self) -> int | None:
        """The scale blocks of wgrad run along rows. NVFP4 also has a scale of the tensor, for all rows."""
        return None if self.recipe.gemm == "FP4" else self.method(LHS).block[1]

    @property
    def note(self) -> str:
        """See `Scaling`; the Pallas kernels lack some options of FP4."""
        others = {"46", "eden"} & {*self.recipe.fp4_options} if self.recipe.gemm == "FP4" else set()
        if not others:
            return ""
        return f"{' and '.join(sorted(others))}: on a GPU XLA quantizes, not the Pallas kernel"

    @property
    def kernel_method(self) -> BlockMethod:
        """See `Scaling`."""
        return self.method(RHS)

    @property
    def takes_computed(self) -> bool:
        """See `Scaling`."""
        return self.recipe.gemm == "FP8" and not any(self.recipe.override_linear_precision)

    def init(self) -> State:
        """See `Scaling`."""
        if self.recipe.gemm == "FP4" and {"stochastic", "eden"} & {*self.recipe.fp4_options}:
            return {KEY: jnp.zeros(2, jnp.float32)}
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
            copies = quantize_operand(self, operand, x, state, gemms, whole_amax)
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
        part, whole_amax = shard.side.to_matrix(value(rhs)), None
        if self.recipe.gemm == "FP4":
            whole_amax = kernel.common_amax(amax(part, (*part.shape[:-2], 1, 1)))
        q = self._copies(state, RHS, part, uses, whole_amax)[use]
        # The codes and the scales of blocks; NVFP4's scale of the tensor is the same on all devices.
        leaves, treedef = jax.tree.flatten(q)
        leaves[:2] = kernel.gathered_runs(leaves[:2], _axis(shard, use), shard.runs)
        return treedef.unflatten(leaves)

    def _shard_of_blocks(self, rhs: Any, kernel: KernelMatrix, use: int) -> Any:
        """This device's shard of a kernel; None if not blocks of it are to be sent."""
        shard = kernel.shard()
        if shard is None or self.method(RHS, use).rule == "eden":  # the rotation needs all entries
            return None
        stored = rhs.data if isinstance(rhs, ScaledArray) else rhs
        is_smaller = stored.dtype.itemsize > 1 or self.recipe.gemm == "FP4"
        is_whole = shard.axis > -3 and shard.length % self.method(RHS).block[_axis(shard, use)] == 0
        return shard if is_smaller and is_whole else None

    def stored(self, x: Array, layers: tuple[int, ...], inputs: int) -> ScaledArray | None:
        """See `frozen_kernel.stored_kernel`."""
        return stored_kernel(self.method(RHS), x, layers, inputs)

    def update(self, state: State, seen: Array) -> State:
        """See `Scaling`."""
        del seen
        return {KEY: state[KEY].at[..., 1].add(1)} if KEY in state else {}


def _axis(shard: Any, use: int) -> int:
    """The sharded axis of a kernel's copy: the first GEMM's is transposed."""
    return shard.axis if use else -3 - shard.axis


def quantize_operand(
    scaling: BlockScaling,
    operand: int,
    x: Float[Array, "*batch rows columns"] | Computed,
    state: State,
    gemms: tuple[int, ...] = (0, 1),
    whole_amax: Float32[Array, "..."] | None = None,
) -> tuple[ScaledArray, ...]:
    """Operand number `operand` of a dot, quantized for its GEMMs.

    Args:
        scaling: the scaling of a recipe.
        operand: `LHS`, `RHS` or `GRAD`.
        x: the operand as a matrix: lhs (m, k), rhs (k, n), grad (m, n); `Computed` only for FP8.
        state: the dot's state.
        gemms: for which GEMMs of the operand: 0 for the first one, 1 for the second one.
        whole_amax: see `quantize_blocks`.

    Returns:
        For each GEMM a copy with the contracted axis last, padded to whole blocks.
    """
    transposes = tuple((gemm == 1) != (operand == RHS) for gemm in gemms)
    if scaling.recipe.gemm == "FP8":
        return quantize_rows_and_columns(x, scaling.method(operand), transposes)
    assert not isinstance(x, Computed)
    is_eden = [scaling.method(operand, gemm).rule == "eden" for gemm in gemms]
    if any(is_eden):
        others = tuple(gemm for gemm, is_its in zip(gemms, is_eden, strict=True) if not is_its)
        plain = iter(quantize_operand(scaling, operand, x, state, others, whole_amax) if others else ())
        return tuple(
            eden.quantize_operand(operand, x, gemm, state) if is_its else next(plain)
            for gemm, is_its in zip(gemms, is_eden, strict=True)
        )
    return quantize_rows_and_columns_fp4(
        x,
        state.get(KEY) if operand == GRAD else None,
        scaling.method(operand),
        transposes,
        transform=operand != RHS and "hadamard" in scaling.recipe.fp4_options,
        seeds=_seeds,
        whole_amax=whole_amax,
    )


def _seeds(key: Float32[Array, "2"], amax: Float32[Array, ""]) -> UInt32[Array, "2"]:
    """The seeds of the random bits of a gradient as it is, and of its transpose."""
    of_tensor = lax.bitcast_convert_type(amax, jnp.uint32)
    return leaf_seeds(jnp.stack([key[0].astype(jnp.uint32), of_tensor]), key[1].astype(jnp.int32), 2)
