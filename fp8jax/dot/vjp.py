"""The custom VJP of FP8 dots: the operands are quantized for three GEMMs, fprop, dgrad and wgrad.

This is the rule of `dot_general` and `ragged_dot`, for all scalings and backends. The scaling quantizes
(`fp8jax.scaling.base`), a `Matmul` multiplies matrices, of one dot or by groups of rows, and the sharding of
the kernel has the collectives.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends, scaling
from fp8jax.dot.layout import Side, contract
from fp8jax.dot.output import OPERANDS
from fp8jax.dot.weight import WHOLE, GradSlot, KernelSharding, Weight
from fp8jax.platforms import differentiable_once
from fp8jax.quantization import ScaledArray, as_codes, is_scaled, quantize_gradient, value
from fp8jax.recipe import Recipe
from fp8jax.scaling import GRAD, LHS, RHS, Scaling, State
from fp8jax.scaling.base import KernelMatrix, QuantizedRows, Uses
from fp8jax.scaling.lost_state import checked
from fp8jax.scaling.merge import from_cotangents, to_cotangents, to_fp8_grad

# The error message for a second derivative.
ONCE = (
    "an FP8 product is differentiable once: expected a loss that takes no gradient of a gradient; got one, "
    "such as a penalty on the gradient of an input. Compute that part of the loss without FP8, by the plain "
    "model of dequantized variables, or stop its gradient with `jax.lax.stop_gradient`."
)

# Named scopes of the three GEMMs, in the order of `Recipe.override_linear_precision`.
GEMMS = FPROP, DGRAD, WGRAD = ("fprop", "dgrad", "wgrad")

# The operands of each GEMM, and for which of its two GEMMs each is quantized.
OPERANDS_OF = {
    FPROP: ((LHS, 0), (RHS, 0)),
    DGRAD: ((GRAD, 0), (RHS, 1)),
    WGRAD: ((LHS, 1), (GRAD, 1)),
}
# The axes of operands in high precision.
_HIGH_AXES = ("mk", "kn", "mn")


class DotCall(NamedTuple):
    """One call of a dot, on one device."""

    static: "StaticArgs"
    state: State  # of the dot, or of each group
    others: Any  # the sizes of groups; of a whole matrix, the inputs of lhs's expression or None


class Matmul(Protocol):
    """The matmuls of a dot: of whole matrices, or of rows sorted by group, with a kernel for each group."""

    def on_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on each device that has groups."""
        ...

    def rows(self, lhs: jax.Array) -> jax.Array:
        """lhs as a matrix."""
        ...

    def side(self, sharding: KernelSharding, rhs: Any) -> Side:
        """The whole kernel's shape and matrix."""
        ...

    def quantize(self, call: DotCall, operand: int, x: jax.Array, uses: Uses) -> QuantizedRows:
        """An activation or an output gradient, quantized for its GEMMs."""
        ...

    def groups(self, others: Any) -> int:
        """The number of groups; 0 for one kernel."""
        ...

    def saved(self, others: Any) -> Any:
        """The part of `DotCall.others` that the backward needs."""
        ...

    def times_kernel(
        self, call: DotCall, gemm: str, rows: Any, kernel: Any, of_rows: Any, to: Any
    ) -> jax.Array:
        """Rows times the kernel, in fprop and dgrad.

        Args:
            call: the call.
            gemm: the name of the GEMM.
            rows, kernel: operands from the scaling, or in high precision.
            of_rows: the sizes of the groups in `rows`.
            to: shape and dtype of the result, ([batch,] rows, columns).
        """
        ...

    def wgrad(self, call: DotCall, lhs: Any, grad: Any, of_rows: Any, side: Side) -> jax.Array:
        """The gradient of the kernel; see `times_kernel`."""
        ...

    def for_groups(self, update: Callable[..., State]) -> Callable[..., State]:
        """`update` of a state and what was seen, for each group."""
        ...


def _check_floating(name: str, x: Any) -> None:
    if isinstance(x, ScaledArray):
        raise TypeError(f"`{name}`: expected a floating array; got a ScaledArray. Call `dequantize` on it.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`{name}`: expected a floating array; got {x.dtype}{list(x.shape)}.")


@dataclasses.dataclass(frozen=True)
class StaticArgs:
    """The static arguments of a dot."""

    recipe: Recipe
    backend: str  # a key of `backends.BACKENDS`
    lhs_dtype: Any
    rhs_dtype: Any  # None for a `ScaledArray`
    grad_slot_dtype: Any  # None without a slot: then a float rhs has a gradient in `rhs_dtype`
    grad_blocks: tuple[int, ...] | None  # the shape of the scales of a `GradSlot`; None for another slot
    out_dtype: Any
    sharding: KernelSharding  # of the kernel
    matmul: Matmul

    @classmethod
    def of(
        cls, lhs: jax.Array, rhs: Weight, recipe: Recipe | str, backend: str, out_dtype: Any, matmul: Any
    ) -> Self:
        """The static arguments of the dot of `lhs` and `rhs`.

        Raises:
            TypeError: `lhs` is no floating array, or `rhs` neither such an array nor a `ScaledArray`.
            ValueError: `recipe.gemm` is neither "FP8" nor "FP4".
        """
        _check_floating("lhs", lhs)
        if not isinstance(rhs.value, ScaledArray):
            _check_floating("rhs", rhs.value)
        recipe = Recipe.parse(recipe)
        if not recipe.is_quantized:
            raise ValueError(f"`recipe`: expected gemm=FP8 or FP4 for an FP8 dot; got gemm={recipe.gemm}.")
        rhs_dtype = None if isinstance(rhs.value, ScaledArray) else rhs.value.dtype
        if out_dtype is None:
            out_dtype = jnp.promote_types(lhs.dtype, rhs_dtype or jnp.float32)
        slot, blocks = rhs.grad_slot, None
        if isinstance(slot, GradSlot):
            slot, blocks = slot.data, slot.scale.shape
        of_slot = (None if slot is None else slot.dtype, blocks)
        dtypes = (lhs.dtype, rhs_dtype, *of_slot, jnp.dtype(out_dtype))
        return cls(recipe, backend, *dtypes, rhs.shard or WHOLE, matmul)

    @property
    def has_wgrad(self) -> bool:
        """Whether to compute the weight gradient; a `ScaledArray` has a gradient only with a slot."""
        return self.grad_slot_dtype is not None or self.rhs_dtype is not None

    @property
    def scaling(self) -> Scaling:
        """The scaling of the recipe."""
        return scaling.of_recipe(self.recipe)

    def is_high(self, gemm: str) -> bool:
        """Whether a GEMM is computed in high precision."""
        return self.recipe.override_linear_precision[GEMMS.index(gemm)]

    @property
    def wgrad_dtype(self) -> Any:
        """The output dtype of the wgrad GEMM: the dtype of the gradient, so that it is rounded once.

        The gradient of an FP8 slot in a bfloat16 layer is rounded twice, to bfloat16 and to E4M3: a float32
        output of the GEMM would be written and read again, 11% more traffic in a step of MLP blocks.
        """
        if self.grad_blocks is not None:
            return self.out_dtype
        return next(dtype for dtype in (self.grad_slot_dtype, self.rhs_dtype, self.out_dtype) if dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    static: StaticArgs, lhs: jax.Array, rhs: Any, grad_slot: Any, state: State, others: Any
) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, others, has_backward=False)[0]


def _forward(
    static: StaticArgs,
    lhs: jax.Array,
    rhs: Any,
    grad_slot: Any,
    state: State,
    others: Any,
    *,
    has_backward: bool = True,
) -> tuple[jax.Array, Any]:
    """The output and the residuals."""
    state = lax.stop_gradient(from_cotangents(state))  # the state has no second derivative
    output = functools.partial(_output, static, has_backward)
    out, residuals, seen = static.matmul.on_each(output)(lhs, rhs, state, others)
    others = static.matmul.saved(others)
    # Codes have no tangents, and a `ScaledArray`'s gradient is in its slot. The amaxes carry the tangents, so
    # that a second derivative raises.
    seen = differentiable_once(seen, (lhs, rhs, grad_slot), ONCE)
    if static.scaling.is_residual_quantized:
        seen, others = checkpoint_name((seen, others), OPERANDS)
    return differentiable_once(out, seen, ONCE), (residuals, seen, state, others)


def _output(
    static: StaticArgs, has_backward: bool, lhs: jax.Array, rhs: Any, state: State, others: Any
) -> tuple[jax.Array, Any, Any]:
    """The output of this device's groups, the residuals of lhs and of the kernel, and their amaxes."""
    call, matmul = DotCall(static, state, others), static.matmul
    has_wgrad = has_backward and static.has_wgrad
    rows = matmul.rows(lhs)  # before the cast, so that the codes have the GEMM's layout
    uses = (not static.is_high(FPROP), has_wgrad and not static.is_high(WGRAD))
    q = matmul.quantize(call, LHS, rows, uses)
    kernel = KernelMatrix(matmul.side(static.sharding, rhs), static.sharding)
    prepared, seen_rhs = static.scaling.prepare(state, rhs, kernel, matmul.groups(others))
    # The GEMM reads what is saved, so that remat casts nothing twice.
    is_one = q.first is q.second
    second = checkpoint_name(q.second, OPERANDS)
    prepared = prepared if prepared is rhs else checkpoint_name(prepared, OPERANDS)
    first = _operand(static, FPROP, second if is_one else q.first, rows)
    with jax.named_scope(FPROP):
        right = _kernel_operand(static, FPROP, rhs, prepared, kernel, state)
        to = jax.ShapeDtypeStruct((*rows.shape[:-1], kernel.matrix[-1]), static.out_dtype)
        out = matmul.times_kernel(call, FPROP, first, right, q.sizes, to)
    of_lhs = _operand(static, WGRAD, second, rows) if has_wgrad else None
    return out, (of_lhs, rhs if static.is_high(DGRAD) else prepared), (q.seen, seen_rhs)


def _operand(static: StaticArgs, gemm: str, q: Any, x: jax.Array) -> Any:
    """The quantized operand; in high precision if the GEMM is, or if it quantizes its operands itself."""
    return x.astype(static.out_dtype) if static.is_high(gemm) or q is None else q


def _kernel_operand(
    static: StaticArgs, gemm: str, rhs: Any, prepared: Any, kernel: KernelMatrix, state: State
) -> Any:
    """The whole kernel for a GEMM, of the stored or the prepared kernel."""
    if static.is_high(gemm):
        return kernel.to_matrix(value(kernel.gathered(rhs))).astype(static.out_dtype)
    _, (_, use) = OPERANDS_OF[gemm]
    return static.scaling.kernel(state, prepared, kernel, use)


def _backward(static: StaticArgs, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    operands, seen, state, others = residuals
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, grad.dtype)
    on_device = static.matmul.on_each(functools.partial(_gradients, static))
    grads = (*cotangents(static, *on_device(operands, seen, state, others, grad)), None)
    return differentiable_once(grads, (grad, seen), ONCE)


def _gradients(
    static: StaticArgs, residuals: Any, seen: Any, state: State, others: Any, grad: jax.Array
) -> tuple[Any, Any, State]:
    """The gradients of lhs and of this device's kernels, and the new state."""
    (lhs, rhs), grad = static.sharding.after(residuals, grad)
    call, matmul = DotCall(static, state, others), static.matmul
    uses = (not static.is_high(DGRAD), static.has_wgrad and not static.is_high(WGRAD))
    q = matmul.quantize(call, GRAD, grad, uses)
    side = matmul.side(static.sharding, rhs)
    with jax.named_scope(DGRAD):
        right = _kernel_operand(static, DGRAD, rhs, rhs, KernelMatrix(side, static.sharding), state)
        to = jax.ShapeDtypeStruct((*grad.shape[:-1], side.matrix[-2]), static.lhs_dtype)
        first = _operand(static, DGRAD, q.first, grad)
        dlhs = matmul.times_kernel(call, DGRAD, first, right, q.sizes, to)
    drhs: Any = None
    if static.has_wgrad:
        with jax.named_scope(WGRAD):
            second = _operand(static, WGRAD, q.second, grad)
            drhs = matmul.wgrad(call, lhs, second, q.sizes, side)
    update = matmul.for_groups(static.scaling.update)
    state = {**state, **update(state, jnp.stack([*seen, q.seen], axis=-1))}
    return dlhs, kernel_gradient(static, drhs, matmul.groups(others)), state


def multiply(
    static: StaticArgs, gemm: str, lhs: Any, rhs: Any, dtype: Any, *, is_batched: bool = False
) -> jax.Array:
    """One GEMM of two operands, in FP8 for `ScaledArray`s; the output has `dtype`."""
    chosen = static.scaling
    (left, use_left), (right, use_right) = OPERANDS_OF[gemm]
    if not is_scaled(lhs):
        numbers = contract(f"{_HIGH_AXES[left]},{_HIGH_AXES[right]}", is_batched)
        return lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32).astype(dtype)
    numbers = contract(f"{chosen.axes[left][use_left]},{chosen.axes[right][use_right]}", is_batched)
    lhs, rhs = as_codes(lhs, chosen.format(left)), as_codes(rhs, chosen.format(right))
    backend = backends.BACKENDS[static.backend]
    return backend.dot(lhs, rhs, numbers, out_dtype=dtype, precise=gemm != FPROP)


def kernel_gradient(static: StaticArgs, drhs: Any, groups: int = 0) -> Any:
    """The kernel's gradient in the dtype of the slot or of rhs; for a `GradSlot` an E4M3 `ScaledArray`.

    Args:
        static: the static arguments.
        drhs: the gradient as the wgrad GEMM returns it; None without one.
        groups: number of kernels, each with a scale; 0 for one kernel.
    """
    if static.grad_slot_dtype is None:
        return None if static.rhs_dtype is None else drhs.astype(static.rhs_dtype)
    is_fp8 = static.grad_blocks is not None
    scattered = functools.partial(static.sharding.scattered, in_fp8=is_fp8)
    drhs = (jax.vmap(scattered) if groups else scattered)(drhs)
    if not is_fp8:
        return drhs.astype(static.grad_slot_dtype)
    blocks = (groups, 1, 1) if groups else ()
    return drhs if isinstance(drhs, ScaledArray) else quantize_gradient(drhs, blocks)


def cotangents(static: StaticArgs, dlhs: jax.Array, drhs: Any, state: State) -> tuple[Any, ...]:
    """The cotangents of lhs, rhs, slot and state."""
    if (blocks := static.grad_blocks) is not None:
        # One dot of stacked kernels has one scale for all of them.
        scale = drhs.scale.reshape(()) if drhs.scale.size == 1 else drhs.scale.reshape(blocks)
        drhs = GradSlot(to_fp8_grad(drhs.data), jnp.broadcast_to(scale, blocks))
    pair = (drhs, None) if static.grad_slot_dtype is None else (None, drhs)
    return (dlhs, *pair, to_cotangents(state))


def _forward_rule(static: StaticArgs, *operands: Any) -> tuple[jax.Array, Any]:
    """`_forward` on `custom_vjp`'s symbolic-zeros wrappers."""
    return _forward(static, *checked(*operands))


_dot.defvjp(_forward_rule, _backward, symbolic_zeros=True)

# Jitted, so that dots of the same shapes are traced and differentiated once.
jitted_dot = jax.jit(_dot, static_argnums=0)
