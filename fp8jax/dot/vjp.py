"""The custom VJP of the FP8 dot: quantization and the three GEMMs (fprop, dgrad, wgrad)."""

import dataclasses
import functools
import warnings
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends, formats, scaling
from fp8jax.dot.layout import Layout, contract
from fp8jax.dot.row_tiles import ExpertSharding
from fp8jax.dot.weight import WHOLE, KernelPlacement, Weight
from fp8jax.platforms import differentiable_once, gpu_barrier
from fp8jax.quantization import (
    ScaledArray,
    amax,
    quantize_by,
    quantize_gradient,
    to_bytes,
    value,
)
from fp8jax.recipe import Recipe
from fp8jax.scaling.merge import FP8_GRAD, from_cotangents, to_cotangents, to_fp8_grad

State = dict[str, jax.Array]

# The `checkpoint_name` of the quantized residuals.
FP8_OPERANDS = "fp8_operands"

# Named scopes of the casts of lhs, rhs and the output gradient.
CASTS = ("cast_lhs", "cast_rhs", "cast_grad")

# The error message for a second derivative.
ONCE = (
    "an FP8 product is differentiable once: expected a loss that takes no gradient of a gradient; got one, "
    "such as a penalty on the gradient of an input. Compute that part of the loss without FP8, by the plain "
    "model of dequantized variables, or stop its gradient with `jax.lax.stop_gradient`."
)

# Named scopes of the three GEMMs, in the order of `Recipe.override_linear_precision`.
GEMMS = FPROP, DGRAD, WGRAD = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Static:
    """The static arguments of a dot."""

    recipe: Recipe
    backend: str  # a key of `backends.BACKENDS`
    lhs_dtype: Any
    rhs_dtype: Any  # None for a `ScaledArray`
    grad_slot_dtype: Any  # None without a slot: then a float rhs has a gradient in `rhs_dtype`
    out_dtype: Any
    placement: KernelPlacement  # of the kernel

    @classmethod
    def of(
        cls, lhs: jax.Array, rhs: Weight, recipe: Recipe | str, backend: str, out_dtype: Any, **own: Any
    ) -> Self:
        """The static arguments of the dot of `lhs` and `rhs`; `own` are the fields of a subclass.

        Raises:
            ValueError: `recipe.gemm` is neither "FP8" nor "FP4".
        """
        recipe = Recipe.parse(recipe)
        if not recipe.is_quantized:
            raise ValueError(f"`recipe`: expected gemm=FP8 or FP4 for an FP8 dot; got gemm={recipe.gemm}.")
        rhs_dtype = None if isinstance(rhs.value, ScaledArray) else rhs.value.dtype
        if out_dtype is None:
            out_dtype = jnp.promote_types(lhs.dtype, rhs_dtype or jnp.float32)
        grad_slot_dtype = None if rhs.grad_slot is None else rhs.grad_slot.dtype
        dtypes = (lhs.dtype, rhs_dtype, grad_slot_dtype, jnp.dtype(out_dtype))
        return cls(recipe, backend, *dtypes, rhs.shard or WHOLE, **own)

    @property
    def has_wgrad(self) -> bool:
        """Whether to compute the weight gradient; a `ScaledArray` has a gradient only with a slot."""
        return self.grad_slot_dtype is not None or self.rhs_dtype is not None

    @property
    def formats(self) -> list[formats.Format]:
        """The formats of `OPERANDS`."""
        forward, backward = map(formats.get, self.recipe.gemm_formats)
        return [forward, forward, backward]

    @property
    def limits(self) -> jax.Array:
        """The largest values of the formats."""
        return jnp.array([format.max for format in self.formats], jnp.float32)


@dataclasses.dataclass(frozen=True)
class DotStatic(Static):
    """The static arguments of a `dot_general`."""

    layout: Layout

    @property
    def wgrad_dtype(self) -> Any:
        """The output dtype of the wgrad GEMM: the dtype of the gradient, so that it is rounded once.

        The gradient of an FP8 slot in a bfloat16 layer is rounded twice, to bfloat16 and to E4M3: a float32
        output of the GEMM would be written and read again, 11% more traffic in a step of MLP blocks.
        """
        if self.grad_slot_dtype is not None and self.grad_slot_dtype != FP8_GRAD:
            return self.grad_slot_dtype
        return (
            self.out_dtype if self.rhs_dtype is None or self.grad_slot_dtype == FP8_GRAD else self.rhs_dtype
        )


@dataclasses.dataclass(frozen=True)
class RaggedStatic(Static):
    """The static arguments of a `ragged_dot`."""

    over: ExpertSharding | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static: DotStatic, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state)[0]


def _forward(
    static: DotStatic, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State
) -> tuple[jax.Array, Any]:
    """The output and the residuals."""
    fprop_is_high, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    state = lax.stop_gradient(from_cotangents(state))  # the state has no second derivative
    lhs = static.layout.lhs.to_matrix(lhs)  # before the cast, so that the codes have the GEMM's layout
    lhs_seen, q_lhs = quantize_operand(static, 0, lhs, state)
    rhs_seen, q_rhs = quantize_operand(static, 1, rhs, state)
    # Codes have no tangents, and a `ScaledArray`'s gradient is in its slot. The amaxes, which all results
    # depend on, carry the tangents, so that a second derivative raises.
    seen = differentiable_once((lhs_seen, rhs_seen), (lhs, rhs, grad_slot), ONCE)
    # The residual of a sharded kernel is the shard; the backward all-gathers it again.
    narrow, seen = checkpoint_name(((packed(q_lhs), packed(q_rhs)), seen), FP8_OPERANDS)
    wide = [value(x).astype(static.out_dtype) for x in (lhs, rhs)]
    operands = wide if fprop_is_high else [unpacked(x, static.formats[0]) for x in narrow]
    with jax.named_scope(FPROP):
        out = _multiply(static, operands[0], _kernel_matrix(static, operands[1]), "mk,kn", precise=False)
    kept = (wide[0] if wgrad_is_high else narrow[0], wide[1] if dgrad_is_high else narrow[1])
    if not static.has_wgrad:
        kept = (None, kept[1])
    return differentiable_once(out, seen, ONCE), (kept, seen, state)


def _kernel_matrix(static: DotStatic, rhs: Any) -> Any:
    """The all-gathered kernel as a matrix."""
    return static.layout.rhs.to_matrix(static.placement.gathered(rhs))


def _backward(static: DotStatic, kept: Any, grad: jax.Array) -> tuple[Any, ...]:
    operands, seen, state = kept
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, grad.dtype)
    operands, grad = static.placement.after(operands, grad)
    lhs, rhs = (unpacked(operand, static.formats[0]) for operand in operands)
    rhs = _kernel_matrix(static, rhs)
    _, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    grad_seen, q_grad = quantize_operand(static, 2, grad, state)
    q_grad = nan_unless_finite(q_grad, grad_seen)
    with jax.named_scope(DGRAD):
        dlhs = _multiply(static, grad if dgrad_is_high else q_grad, rhs, "mn,kn", precise=True)
    drhs: Any = None
    if static.has_wgrad:
        with jax.named_scope(WGRAD):
            right = grad if wgrad_is_high else q_grad
            drhs = _multiply(static, lhs, right, "mk,mn", precise=True, dtype=static.wgrad_dtype)
        drhs = static.layout.rhs.to_tensor(drhs)
    dlhs = static.layout.lhs.to_tensor(dlhs).astype(static.lhs_dtype)
    update = scaling.of_recipe(static.recipe).update
    state = {**state, **update(state, jnp.stack([*seen, grad_seen]), static.limits)}
    drhs, state = kernel_gradient(static, drhs, state)
    return differentiable_once(cotangents(static, dlhs, drhs, state), (grad, seen), ONCE)


def nan_unless_finite(grad: ScaledArray, amax: jax.Array) -> ScaledArray:
    """The output gradient, NaN if its amax is not finite: a cast saturates, so the codes are finite."""
    return ScaledArray(grad.data, jnp.where(amax < jnp.inf, grad.scale, jnp.nan))


def kernel_gradient(static: Static, drhs: Any, state: State, groups: int = 0) -> tuple[Any, State]:
    """The kernel's gradient in the dtype of the slot or of rhs, and the new state.

    Args:
        static: the static arguments.
        drhs: the gradient as the wgrad GEMM returns it; None without one.
        state: the new state but for the scale of E4M3 codes, the gradient for an FP8 slot. Without such a
            slot `wgrad_scale` is -inf, so that another use of the kernel can set it.
        groups: number of kernels, each with a scale; 0 for one kernel.
    """
    as_codes = static.grad_slot_dtype == FP8_GRAD
    if static.grad_slot_dtype is not None:
        scattered = functools.partial(static.placement.scattered, as_codes=as_codes)
        drhs = (jax.vmap(scattered) if groups else scattered)(drhs)
    if as_codes:
        blocks = (groups, 1, 1) if groups else ()
        q = drhs if isinstance(drhs, ScaledArray) else quantize_gradient(drhs, blocks)
        return q.data, {**state, "wgrad_scale": q.scale.reshape(-1) if groups else q.scale}
    if "wgrad_scale" in state:
        state = {**state, "wgrad_scale": jnp.full_like(state["wgrad_scale"], -jnp.inf)}
    dtype = static.rhs_dtype if static.grad_slot_dtype is None else static.grad_slot_dtype
    return None if dtype is None else drhs.astype(dtype), state


def cotangents(static: Static, dlhs: jax.Array, drhs: Any, state: State) -> tuple[Any, ...]:
    """The cotangents of lhs, rhs, slot and state."""
    if static.grad_slot_dtype == FP8_GRAD:
        drhs = to_fp8_grad(drhs)
    pair = (drhs, None) if static.grad_slot_dtype is None else (None, drhs)
    return (dlhs, *pair, to_cotangents(state))


def checked(*operands: Any) -> tuple[Any, ...]:
    """The values of lhs, rhs, slot, state and further operands, from `custom_vjp`'s symbolic-zeros wrappers.

    Raises:
        TypeError: JAX's own `grad` is taken with respect to a `ScaledArray`.

    Warns:
        A gradient is taken with respect to the weights, but not to the scaling state.
    """

    def is_perturbed(tree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(tree))

    _, of_rhs, of_grad_slot, of_state = map(is_perturbed, operands[:4])
    values = tuple(jax.tree.map(lambda leaf: leaf.value, operands))
    lhs, rhs, grad_slot, state = values[:4]
    if of_rhs and isinstance(rhs, ScaledArray):
        raise TypeError(
            f"a scaled weight, {rhs.data.dtype}{list(rhs.shape)}, has no gradient of its own: expected "
            "`fp8jax.value_and_grad` (which takes Flax variables and NNX modules); got JAX's or NNX's own."
        )
    if state and (of_rhs or of_grad_slot) and not of_state:
        _warn_of_lost(state)
    return (lhs, rhs, grad_slot, state, *values[4:])


def _warn_of_lost(state: State) -> None:
    lost = "its count of steps does not advance" if "key" in state else "its new amaxes are lost"
    warnings.warn(
        f"a gradient is taken with respect to weights but not to the FP8 scaling state: {lost}. Take it "
        "with `fp8jax.value_and_grad`, of all of the variables.",
        stacklevel=4,
    )


@jax.custom_vjp
def with_state(weights: Any, kernels: Any, state: State) -> Any:
    """The weights of a model that are not operands of FP8 dots, unchanged: biases, adapters, other layers.

    Args:
        weights: a tree of float arrays.
        kernels: the operands of FP8 dots, which warn by themselves.
        state: the scaling state of one of these dots.

    Warns:
        A gradient is taken with respect to the weights, but not to kernels or to the scaling state.
    """
    del kernels, state
    return weights


def _with_state_forward(weights: Any, *others: Any) -> tuple[Any, None]:
    is_of_weights, is_of_others = (
        any(leaf.perturbed for leaf in jax.tree.leaves(tree)) for tree in (weights, others)
    )
    if is_of_weights and not is_of_others:
        _warn_of_lost(others[-1])
    return jax.tree.map(lambda leaf: leaf.value, weights), None


def _with_state_backward(residuals: None, grad: Any) -> tuple[Any, None, None]:
    del residuals
    return grad, None, None


with_state.defvjp(_with_state_forward, _with_state_backward, symbolic_zeros=True)


def _forward_rule(static: DotStatic, *operands: Any) -> tuple[jax.Array, Any]:
    """`_forward` on `custom_vjp`'s symbolic-zeros wrappers."""
    return _forward(static, *checked(*operands))


_dot.defvjp(_forward_rule, _backward, symbolic_zeros=True)

# Jitted, so that dots of the same shapes are traced and differentiated once.
jitted_dot = jax.jit(_dot, static_argnums=0)


def quantize_operand(static: Static, operand: int, x: Any, state: State) -> tuple[jax.Array, ScaledArray]:
    """The amax of `x`, and `x` quantized with the scale of the recipe's scaling.

    A `ScaledArray` in the GEMM's format with one scale is not quantized again.
    """
    format = static.formats[operand]
    if isinstance(x, ScaledArray) and x.data.dtype == format.dtype and x.scale.size == 1:
        scale = x.scale.reshape(()).astype(jnp.float32)
        return scale * format.max, ScaledArray(x.data, scale)  # an upper bound of the amax
    seen = amax(x)
    seen = static.placement.common_amax(seen) if operand == 1 else seen
    scale = scaling.of_recipe(static.recipe).scale(state, operand, seen, format.max)
    with jax.named_scope(CASTS[operand]):
        q = quantize_by(x, format, scale)
    return seen, stored(q, format)


def stored(q: ScaledArray, format: formats.Format) -> ScaledArray:
    """`q` behind a barrier. Without it XLA on GPU stores the high-precision tensor for the backward and casts
    it again."""
    return unpacked(gpu_barrier(packed(q)), format)


def packed(q: ScaledArray) -> ScaledArray:
    """`q` with its codes as bytes, the storage of residuals; see `to_bytes`."""
    return ScaledArray(to_bytes(q.data), q.scale)


def unpacked(matrix: Any, format: formats.Format) -> Any:
    """The inverse of `packed`; float arrays stay unchanged."""
    if not isinstance(matrix, ScaledArray):
        return matrix
    return ScaledArray(lax.bitcast_convert_type(matrix.data, format.dtype), matrix.scale)


def _multiply(
    static: DotStatic, lhs: Any, rhs: Any, spec: str, *, precise: bool, dtype: Any = None
) -> jax.Array:
    """One GEMM of matrices; the output has `dtype`, by default the layer's."""
    dtype = static.out_dtype if dtype is None else dtype
    return gemm(static, lhs, rhs, contract(spec, static.layout.is_batched), precise, dtype)


def gemm(
    static: Static, lhs: Any, rhs: Any, numbers: lax.DotDimensionNumbers, precise: bool, dtype: Any
) -> jax.Array:
    """One GEMM, in FP8 for `ScaledArray`s; the output has `dtype`."""
    if isinstance(lhs, ScaledArray):
        return backends.BACKENDS[static.backend].dot(lhs, rhs, numbers, out_dtype=dtype, precise=precise)
    return lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32).astype(dtype)
