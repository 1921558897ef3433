"""FP8 `jax.lax.ragged_dot`: rows sorted by group, and a kernel for each group.

    y[rows of g]  = lhs[rows of g] . rhs[g]

The result and the gradients equal those of `dot_general` for each group. Under NVFP4 they are rounded
differently: each block of rows has a scale of its own, as a tensor has.

Each group has a scaling state, with scales for its kernel, its rows and their gradients. A group without rows
adds no amax to the histories of rows and gradients, and the gradient of its kernel is zero.
`fp8jax.dot.row_tiles` computes the GEMMs.

    >>> import jax.numpy as jnp
    >>> from fp8jax.dot import init_ragged_state, ragged_dot
    >>> x, w = jnp.ones((6, 16)), jnp.ones((3, 16, 32))
    >>> y = ragged_dot(x, w, jnp.array([4, 0, 2]), recipe="te", state=init_ragged_state("te", 3))
    >>> y.shape, float(y[5, 0])
    ((6, 32), 16.0)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends, scaling
from fp8jax.dot.block_ragged import jitted_block_ragged
from fp8jax.dot.dot_general import check_state, init_state
from fp8jax.dot.layout import contract, on_data
from fp8jax.dot.row_tiles import (
    ExpertSharding,
    Multiply,
    groups_of_rows,
    on_each,
    rows_times_matrices,
    rows_times_rows,
)
from fp8jax.dot.vjp import (
    CASTS,
    DGRAD,
    FP8_OPERANDS,
    FPROP,
    ONCE,
    WGRAD,
    RaggedStatic,
    State,
    checked,
    cotangents,
    gemm,
    kernel_gradient,
    nan_unless_finite,
    packed,
    quantize_operand,
    stored,
    unpacked,
)
from fp8jax.dot.weight import Weight
from fp8jax.platforms import differentiable_once
from fp8jax.quantization import ScaledArray, amax, quantize_by, value
from fp8jax.recipe import Recipe
from fp8jax.scaling.merge import broadcast_under_vmap, from_cotangents, to_fm32


def init_ragged_state(recipe: Recipe | str, groups: int) -> State:
    """The scaling state of one `ragged_dot`: the state of a dot for each group, stacked along the first axis.

    Args:
        recipe: a `Recipe`, or its text.
        groups: the number of kernels.
    """
    state = init_state(recipe)
    return {name: jnp.broadcast_to(kept, (groups, *kept.shape)) for name, kept in state.items()}


def ragged_dot(
    lhs: jax.Array,
    rhs: Any,
    group_sizes: jax.Array,
    *,
    recipe: Recipe | str,
    state: State,
    out_dtype: Any = None,
    backend: str = "auto",
    over: ExpertSharding | None = None,
) -> jax.Array:
    """`lax.ragged_dot` with its forward and backward GEMMs in FP8.

    Args:
        lhs: float array, shape=(rows, k), with the rows sorted by group.
        rhs: the kernels, shape=(groups, k, n): float array, `ScaledArray` with a scale for each group,
            shape=(groups, 1, 1), or `Weight`.
        group_sizes: int32, shape=(groups,). Rows past their sum have output 0 and no gradient.
        recipe, out_dtype, backend: see `dot_general`.
        state: scaling state, see `init_ragged_state`.
        over: the mesh axis that shards the groups. Each device has its groups and their rows: all arrays are
            sharded along their first axis, and each device may have rows past the sum of its group sizes.

    Returns:
        Array of shape (rows, n). The gradients are as in `dot_general`; an FP8 gradient of the kernels has a
        scale for each group.

    Raises:
        ValueError: `recipe.gemm` is neither "FP8" nor "FP4", `state` is of another recipe, or the shapes do
            not match.
    """
    weight = Weight.of(rhs)
    kernel, grad_slot = weight.value, weight.grad_slot
    _check_shapes(lhs.shape, weight.shape, group_sizes.shape)
    static = RaggedStatic.of(
        lhs,
        weight,
        recipe,
        backends.choose(backend, scaling=Recipe.parse(recipe).scaling).name,
        out_dtype,
        over=over,
    )
    check_state(static.recipe, state)
    state, grad_slot = broadcast_under_vmap(
        (to_fm32(state), grad_slot), lhs, group_sizes, *jax.tree.leaves(kernel)
    )
    dot = jitted_block_ragged if static.recipe.has_blocks else _jitted
    return dot(static, lhs, kernel, grad_slot, state, group_sizes)


def _check_shapes(lhs: Any, rhs: Any, sizes: Any) -> None:
    if len(lhs) != 2 or len(rhs) != 3 or lhs[1] != rhs[1] or sizes != rhs[:1]:
        raise ValueError(
            "expected `lhs` (rows, k), `rhs` (groups, k, n) and `group_sizes` (groups,); got "
            f"{tuple(lhs)}, {tuple(rhs)} and {tuple(sizes)}."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(static: RaggedStatic, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, sizes)[0]


def _forward(
    static: RaggedStatic, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any
) -> tuple[Any, Any]:
    """The output and the residuals."""
    on_device = on_each(functools.partial(_forward_of_device, static), static.over)
    out, (kept, seen, *others) = on_device(lhs, rhs, lax.stop_gradient(from_cotangents(state)), sizes)
    seen = differentiable_once(seen, (lhs, rhs, grad_slot), ONCE)
    kept, seen, *others = checkpoint_name((kept, seen, *others), FP8_OPERANDS)
    return differentiable_once(out, seen, ONCE), (kept, seen, *others)


def _forward_of_device(static: RaggedStatic, lhs: Any, rhs: Any, state: State, sizes: Any) -> tuple[Any, Any]:
    fprop_is_high, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    lhs_seen, q_lhs = _quantize_rows(static, 0, lhs, state, sizes)
    rhs_seen, q_rhs = _quantize_kernels(static, rhs, state)
    wide = [value(x).astype(static.out_dtype) for x in (lhs, rhs)]
    x, kernels = wide if fprop_is_high else [q_lhs, q_rhs]
    with jax.named_scope(FPROP):
        kernels = on_data(static.placement.gathered, kernels)
        shape = jax.ShapeDtypeStruct((lhs.shape[0], kernels.shape[2]), static.out_dtype)
        multiply = _gemm(static, 0, 1, "mk,kn", static.out_dtype, precise=False)
        out = rows_times_matrices(x, kernels, sizes, multiply, shape)
    kept = (wide[0] if wgrad_is_high else q_lhs, wide[1] if dgrad_is_high else q_rhs)
    return out, (kept, (lhs_seen, rhs_seen), state, sizes)


def _backward(static: RaggedStatic, kept: Any, grad: Any) -> tuple[Any, ...]:
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, static.out_dtype)
    on_device = on_each(functools.partial(_backward_of_device, static), static.over)
    grads = (*cotangents(static, *on_device(kept, grad)), None)
    return differentiable_once(grads, (grad, kept[1]), ONCE)


def _backward_of_device(static: RaggedStatic, kept: Any, grad: jax.Array) -> tuple[Any, Any, State]:
    """The gradients of rows and kernels, and the new scaling state."""
    (lhs, rhs), seen, state, sizes = kept
    (lhs, rhs), grad = static.placement.after((lhs, rhs), grad)
    _, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    grad_seen, q_grad = _quantize_rows(static, 2, grad, state, sizes)
    q_grad = nan_unless_finite(q_grad, grad_seen)
    wide = grad.astype(static.out_dtype)
    kernels = on_data(static.placement.gathered, rhs)
    with jax.named_scope(DGRAD):
        shape = jax.ShapeDtypeStruct((grad.shape[0], kernels.shape[1]), static.lhs_dtype)
        multiply = _gemm(static, 2, 1, "mn,kn", static.out_dtype, precise=True)
        dlhs = rows_times_matrices(wide if dgrad_is_high else q_grad, kernels, sizes, multiply, shape)
    with jax.named_scope(WGRAD):
        multiply = _gemm(static, 0, 2, "mk,mn", jnp.float32, precise=True)
        right = wide if wgrad_is_high else q_grad
        drhs = rows_times_rows(lhs, right, sizes, multiply, kernels.shape)
    update = jax.vmap(scaling.of_recipe(static.recipe).update, (0, 0, None))
    state = {**state, **update(state, jnp.stack([*seen, grad_seen], axis=1), static.limits)}
    return dlhs, *kernel_gradient(static, drhs, state, groups=sizes.shape[0])


def _forward_rule(static: RaggedStatic, *operands: Any) -> tuple[jax.Array, Any]:
    return _forward(static, *checked(*operands))


_ragged.defvjp(_forward_rule, _backward, symbolic_zeros=True)
_jitted = jax.jit(_ragged, static_argnums=0)


def _quantize_rows(
    static: RaggedStatic, operand: int, x: jax.Array, state: State, sizes: jax.Array
) -> tuple[jax.Array, ScaledArray]:
    """The amax of each group's rows, shape=(groups,), and the rows quantized with their groups' scales."""
    groups, format = sizes.shape[0], static.formats[operand]
    group = groups_of_rows(sizes, x.shape[0])
    # Rows past the last group are dropped; a group without rows has amax 0.
    of_rows = amax(x, (x.shape[0], 1)).reshape(-1)
    seen = jnp.zeros(groups, jnp.float32).at[group].max(of_rows, mode="drop")
    choose = scaling.of_recipe(static.recipe).scale
    scale = jax.vmap(lambda state, amax: choose(state, operand, amax, format.max))(state, seen)
    with jax.named_scope(CASTS[operand]):
        of_row = jnp.take(scale, group, mode="clip")[:, None]
        q = stored(ScaledArray(quantize_by(x, format, of_row).data, scale), format)
    return seen, packed(q)


def _quantize_kernels(static: RaggedStatic, rhs: Any, state: State) -> tuple[jax.Array, ScaledArray]:
    """The amax of each kernel, shape=(groups,), and the quantized kernels."""
    has_scales = isinstance(rhs, ScaledArray) and rhs.scale.shape[:1] == rhs.shape[:1]
    one = functools.partial(quantize_operand, static, 1)
    seen, q = jax.vmap(one)(rhs if has_scales else value(rhs), state)
    return seen, packed(q)


def _gemm(static: RaggedStatic, left: int, right: int, spec: str, dtype: Any, *, precise: bool) -> Multiply:
    """The GEMM of one block, with operands number `left` and `right`."""

    def multiply(lhs: Any, rhs: Any) -> jax.Array:
        lhs, rhs = unpacked(lhs, static.formats[left]), unpacked(rhs, static.formats[right])
        return gemm(static, lhs, rhs, contract(spec), precise, dtype)

    return multiply
