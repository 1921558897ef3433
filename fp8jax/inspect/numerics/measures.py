"""The numbers that `Recorder` records of one operand of a dot under a recipe.

A GEMM's operand is a matrix, ([batch,] rows, columns). Under block scaling an operand has a copy for each of
its two GEMMs; the numbers are of the copy for the first one, fprop or dgrad.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from fp8jax import formats, scaling
from fp8jax.dot.layout import Side
from fp8jax.dot.vjp import GEMMS, OPERANDS_OF
from fp8jax.dot.weight import WHOLE
from fp8jax.quantization import UNSET, ScaledArray, amax, as_codes, format_of, quantize_gradient
from fp8jax.recipe import Recipe
from fp8jax.scaling import GRAD, LHS, RHS, State, eden
from fp8jax.scaling.base import KernelMatrix
from fp8jax.scaling.merge import is_state

WGRAD = 3
# The names of `LHS`, `RHS`, `GRAD` and `WGRAD`.
OPERANDS = ("input", "kernel", "output gradient", "weight gradient")

_AXES = ("mk", "kn", "mn")
# The index in `GEMMS` of the first GEMM of each operand.
_FIRST = tuple(
    next(i for i, gemm in enumerate(GEMMS) if (operand, 0) in OPERANDS_OF[gemm])
    for operand in (LHS, RHS, GRAD)
)
# float32 rounds amax / scale up to the largest code or above it: no value is clipped for that.
_ROUNDING = np.float32(1 + 2**-20)
_TINY = np.finfo(np.float32).tiny


class Codes(NamedTuple):
    """An operand after quantization."""

    values: Float32[Array, "..."]  # dequantized
    is_largest: Bool[Array, "..."]  # whether the code is the format's max


class Measures(NamedTuple):
    """Numbers of an operand under a recipe; those of several uses of a layer are added or merged by max."""

    sums: Float32[Array, "3"]  # shares of underflow and saturation; noise / signal
    noise: tuple[Array, ...]  # noise / signal of each channel, see `channels`
    maxes: Float32[Array, "2"]  # log2 of the largest magnitude, and of 1 / the smallest one but zero


def key_of(recipe: Recipe, operand: int) -> Recipe:
    """The recipe without the columns that do not change an operand without a state, so that recipes with the
    same cast share its numbers."""
    if operand == WGRAD:
        return replace(Recipe(), weight_grad=recipe.weight_grad)
    if not recipe.is_quantized:
        return replace(Recipe(), gemm=recipe.gemm)
    names = {"gemm", "override_linear_precision", "scaling", "fp8_format", "fp4_options", "margin"}
    if operand == RHS:
        names |= {"weight", "master_weight"}
    changes = {name: getattr(recipe, name) for name in names}
    if operand != GRAD:  # it is in E4M3 also in HYBRID, which is not legal with every scaling
        changes["fp8_format"] = "E4M3"
    return scaling.with_fresh_scales(replace(Recipe(), **changes))


def operand_codes(recipe: Recipe, operand: int, x: Any, side: Side, state: State | None) -> Codes | None:
    """An operand as its first GEMM takes it; None if nothing rounds it.

    Args:
        recipe: the recipe.
        operand: `LHS`, `RHS`, `GRAD` or `WGRAD`.
        x: the operand as a matrix; a kernel in its own shape, as the recipe stores it.
        side: the kernel's shape and matrix.
        state: the dot's scaling state. None, or a state without an amax yet, scales delayed scaling by the
            tensor's own amax.
    """
    if operand == WGRAD:
        return _codes(quantize_gradient(x)) if recipe.weight_grad == "E4M3" else None
    if recipe.is_quantized and recipe.override_linear_precision[_FIRST[operand]]:
        return None
    if not recipe.is_quantized:
        dtype = formats.get(recipe.gemm).dtype
        values = jnp.asarray(x).astype(dtype).astype(jnp.float32)
        return Codes(side.to_matrix(values) if operand == RHS else values, jnp.zeros((), bool))
    own = scaling.with_fresh_scales(recipe) if state is None else replace(recipe, first_scale="tensor")
    chosen, state = scaling.of_recipe(own), state or {}
    if is_state(state):
        is_known = jnp.max(state["amax_history"], axis=-1) > 0
        state = {**state, "scale": jnp.where(is_known, state["scale"], UNSET)}
    if operand == RHS:
        kernel = KernelMatrix(side, WHOLE)
        residual, _ = chosen.prepare(state, x, kernel, 0)
        q = chosen.kernel(state, residual, kernel, 0)
    else:
        (q, _), _ = chosen.quantize(state, operand, x, (True, False))
    q = as_codes(q, chosen.format(operand))
    codes = _codes(q)
    if operand == GRAD and "eden" in recipe.fp4_options:  # clipped entries are those of the rotated tensor
        codes = Codes(eden.values(q, state, operand, 0), jnp.zeros_like(codes.is_largest))
    if chosen.axes[operand][0] != _AXES[operand]:
        codes = Codes(*(jnp.swapaxes(part, -1, -2) for part in codes))
    rows, columns = side.matrix[-2:] if operand == RHS else x.shape[-2:]
    return Codes(*(part[..., :rows, :columns] for part in codes))


def _codes(q: ScaledArray) -> Codes:
    return Codes(q.dequantize(), jnp.abs(q.data.astype(jnp.float32)) == format_of(q).max)


def measured(
    x: Float[Array, "..."], codes: Codes | None, amaxes: tuple[Array, ...], share: Any = None
) -> Measures:
    """The numbers of a float32 operand with these codes; None for the operand itself.

    Counts are exact below 2**31 entries. Noise and signal are sums of float32 squares, of a channel in units
    of its amax, so no square underflows. A tensor of zeros has no noise; NaN and infinities make noise NaN.

    Args:
        x: the operand.
        codes: its codes.
        amaxes: its `channels`.
        share: the share of the rows that count for saturation, the others being zeros; by default all.
    """
    if codes is None:
        return Measures(jnp.zeros(3, jnp.float32), tuple(map(jnp.zeros_like, amaxes)), _ends(x))
    values, is_largest = lax.optimization_barrier(codes)  # otherwise each sum casts the operand again
    nonzero, count = x != 0, jnp.maximum(jnp.sum(x != 0, dtype=jnp.int32), 1)
    lost = jnp.sum(nonzero & (values == 0), dtype=jnp.int32) / count
    is_clipped = is_largest & (jnp.abs(x) > jnp.abs(values) * _ROUNDING)
    clipped = jnp.sum(is_clipped, dtype=jnp.int32) / max(x.size, 1)
    clipped = clipped if share is None else clipped / share
    pairs = [
        tuple(_squares(part, of_axis, axis) for part in (x - values, x))
        for axis, of_axis in zip((-1, -2), amaxes, strict=False)
    ]
    weights = jnp.square(amaxes[0] / jnp.maximum(jnp.max(amaxes[0], initial=0), _TINY))
    whole = _ratio(*(jnp.sum(squares * weights) for squares in pairs[0]))
    sums = jnp.stack([lost, clipped, whole]).astype(jnp.float32)
    return Measures(sums, tuple(_ratio(*pair) for pair in pairs), _ends(values))


def _ends(values: jax.Array) -> jax.Array:
    """`Measures.maxes`."""
    magnitude = jnp.abs(values)
    smallest = jnp.min(jnp.where(values == 0, jnp.inf, magnitude), initial=jnp.inf)
    return jnp.log2(jnp.stack([amax(values), smallest])) * jnp.float32([1.0, -1.0])


def _squares(x: jax.Array, amaxes: jax.Array, axis: int) -> jax.Array:
    """The sum of squares of each channel in units of its amax."""
    units = 1 / jnp.maximum(amaxes, _TINY)
    shape = [1] * x.ndim
    shape[axis] = units.size
    return jnp.sum(jnp.square(x * units.reshape(shape)), axis=_others(x, axis))


def _ratio(noise: jax.Array, signal: jax.Array) -> jax.Array:
    return jnp.where(signal == 0, 0.0, noise / jnp.where(signal == 0, 1.0, signal))


def channels(operand: int, x: Float[Array, "..."]) -> tuple[jax.Array, ...]:
    """The amaxes of a matrix's columns; of its rows, too, for a kernel and its gradient. inf for NaN."""
    magnitude = jnp.where(x == x, jnp.abs(x), jnp.inf)
    axes = (-1,) if operand in (LHS, GRAD) else (-1, -2)
    return tuple(jnp.max(magnitude, axis=_others(x, axis), initial=0) for axis in axes)


def _others(x: jax.Array, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(-x.ndim, 0) if each != axis)
