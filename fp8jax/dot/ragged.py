"""FP8 `jax.lax.ragged_dot`: rows sorted by group, and a kernel for each group.

    y[rows of g]  = lhs[rows of g] . rhs[g]

The result and the gradients equal those of `dot_general` for each group. Each group has a scaling state, with
scales for its kernel, its rows and their gradients. A group without rows adds no amax to the histories of
rows and gradients, and the gradient of its kernel is zero. `fp8jax.dot.blocks` computes the GEMMs.

    >>> import jax.numpy as jnp
    >>> from fp8jax.dot import init_ragged_state, ragged_dot
    >>> x, w = jnp.ones((6, 16)), jnp.ones((3, 16, 32))
    >>> y = ragged_dot(x, w, jnp.array([4, 0, 2]), recipe="te", state=init_ragged_state("te", 3))
    >>> y.shape, float(y[5, 0])
    ((6, 32), 16.0)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8jax import backends, formats, scaling
from fp8jax.dot.blocks import Operand, groups_of_rows, rows_times_matrices, rows_times_rows
from fp8jax.dot.dot_general import init_state
from fp8jax.dot.vjp import (
    CASTS,
    DGRAD,
    FP8_OPERANDS,
    FPROP,
    ONCE,
    WGRAD,
    State,
    checked,
    packed,
    stored,
    without_wgrad_scale,
)
from fp8jax.dot.weight import WHOLE, KernelPlacement, Weight
from fp8jax.platforms import differentiable_once, over_axis
from fp8jax.quantization import ScaledArray, amax, quantize, quantize_gradient, value
from fp8jax.recipe import Recipe
from fp8jax.scaling.merge import (
    FP8_GRAD,
    broadcast_under_vmap,
    from_fm32,
    to_cotangents,
    to_fm32,
    to_fp8_grad,
)


class ExpertSharding(NamedTuple):
    """The mesh axis that shards the groups (experts)."""

    mesh: Mesh
    axis_name: str


class _Static(NamedTuple):
    """The static arguments of the dot."""

    recipe: Recipe
    backend: str
    lhs_dtype: Any
    rhs_dtype: Any  # None for a `ScaledArray`
    grad_slot_dtype: Any  # None without a slot: then a float rhs has a gradient in `rhs_dtype`
    out_dtype: Any
    placement: KernelPlacement  # of the kernels
    over: ExpertSharding | None

    @property
    def formats(self) -> list[formats.Format]:
        """The formats of lhs, rhs and the output gradient."""
        forward, backward = map(formats.get, self.recipe.gemm_formats)
        return [forward, forward, backward]


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
        ValueError: `recipe.gemm` is not "FP8", or the shapes do not match.
    """
    recipe = Recipe.parse(recipe)
    if recipe.gemm != "FP8":
        raise ValueError(f"`recipe`: expected gemm=FP8 for an FP8 dot; got gemm={recipe.gemm}.")
    weight = rhs if isinstance(rhs, Weight) else Weight(rhs, None)
    kernel, grad_slot = weight.value, weight.grad_slot
    _check_shapes(lhs.shape, weight.shape, group_sizes.shape)
    rhs_dtype = None if isinstance(kernel, ScaledArray) else kernel.dtype
    if out_dtype is None:
        out_dtype = jnp.promote_types(lhs.dtype, rhs_dtype or jnp.float32)
    grad_slot_dtype = None if grad_slot is None else grad_slot.dtype
    dtypes = (lhs.dtype, rhs_dtype, grad_slot_dtype, jnp.dtype(out_dtype))
    static = _Static(recipe, backends.choose(backend).name, *dtypes, weight.shard or WHOLE, over)
    state, grad_slot = broadcast_under_vmap(
        (to_fm32(state), grad_slot), lhs, group_sizes, *jax.tree.leaves(kernel)
    )
    return _jitted(static, lhs, kernel, grad_slot, state, group_sizes)


def _check_shapes(lhs: Any, rhs: Any, sizes: Any) -> None:
    if len(lhs) != 2 or len(rhs) != 3 or lhs[1] != rhs[1] or sizes != rhs[:1]:
        raise ValueError(
            "expected `lhs` (rows, k), `rhs` (groups, k, n) and `group_sizes` (groups,); got "
            f"{tuple(lhs)}, {tuple(rhs)} and {tuple(sizes)}."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(static: _Static, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any) -> jax.Array:
    return _forward(static, lhs, rhs, grad_slot, state, sizes)[0]


def _forward(
    static: _Static, lhs: Any, rhs: Any, grad_slot: Any, state: State, sizes: Any
) -> tuple[Any, Any]:
    """The output and the residuals."""
    on_each = _on_each(static, functools.partial(_forward_of_device, static))
    out, (kept, seen, *others) = on_each(lhs, rhs, lax.stop_gradient(from_fm32(state)), sizes)
    seen = differentiable_once(seen, (lhs, rhs, grad_slot), ONCE)
    kept, seen, *others = checkpoint_name((kept, seen, *others), FP8_OPERANDS)
    return differentiable_once(out, seen, ONCE), (kept, seen, *others)


def _on_each(static: _Static, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under `shard_map`, with all inputs and outputs sharded along their first axis."""
    if static.over is None:
        return function
    return over_axis(function, static.over.mesh, static.over.axis_name, P(static.over.axis_name))


def _forward_of_device(static: _Static, lhs: Any, rhs: Any, state: State, sizes: Any) -> tuple[Any, Any]:
    fprop_is_high, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    lhs_seen, q_lhs = _quantize_rows(static, 0, lhs, state, sizes)
    rhs_seen, q_rhs = _quantize_kernels(static, rhs, state)
    wide = [Operand(value(x).astype(static.out_dtype), None) for x in (lhs, rhs)]
    x, kernels = wide if fprop_is_high else [q_lhs, q_rhs]
    with jax.named_scope(FPROP):
        kernels = _whole(static, kernels)
        shape = jax.ShapeDtypeStruct((lhs.shape[0], kernels.data.shape[2]), static.out_dtype)
        multiply = _multiply(static, 0, 1, "mk,kn", static.out_dtype, precise=False)
        out = rows_times_matrices(x, kernels, sizes, multiply, shape)
    kept = (wide[0] if wgrad_is_high else q_lhs, wide[1] if dgrad_is_high else q_rhs)
    return out, (kept, (lhs_seen, rhs_seen), state, sizes)


def _backward(static: _Static, kept: Any, grad: Any) -> tuple[Any, ...]:
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, static.out_dtype)
    on_each = _on_each(static, functools.partial(_backward_of_device, static))
    dlhs, drhs, state = on_each(kept, grad)
    in_rhs, in_grad_slot = None, None
    if static.grad_slot_dtype == FP8_GRAD:
        in_grad_slot = to_fp8_grad(drhs)
    elif static.grad_slot_dtype is not None:
        in_grad_slot = drhs
    elif static.rhs_dtype is not None:
        in_rhs = drhs
    grads = (dlhs, in_rhs, in_grad_slot, to_cotangents(state), None)
    return differentiable_once(grads, (grad, kept[1]), ONCE)


def _backward_of_device(static: _Static, kept: Any, grad: jax.Array) -> tuple[Any, Any, State]:
    """The gradients of rows and kernels, and the new scaling state."""
    (lhs, rhs), seen, state, sizes = kept
    (lhs, rhs), grad = static.placement.after((lhs, rhs), grad)
    _, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    grad_seen, q_grad = _quantize_rows(static, 2, grad, state, sizes)
    assert q_grad.scale is not None
    # The cast saturates, so an infinite gradient would become finite: a NaN scale makes the outputs NaN.
    q_grad = q_grad._replace(scale=jnp.where(grad_seen < jnp.inf, q_grad.scale, jnp.nan))
    wide = Operand(grad.astype(static.out_dtype), None)
    kernels = _whole(static, rhs)
    with jax.named_scope(DGRAD):
        shape = jax.ShapeDtypeStruct((grad.shape[0], kernels.data.shape[1]), static.lhs_dtype)
        multiply = _multiply(static, 2, 1, "mn,kn", static.out_dtype, precise=True)
        dlhs = rows_times_matrices(wide if dgrad_is_high else q_grad, kernels, sizes, multiply, shape)
    with jax.named_scope(WGRAD):
        multiply = _multiply(static, 0, 2, "mk,mn", jnp.float32, precise=True)
        right = wide if wgrad_is_high else q_grad
        drhs = rows_times_rows(lhs, right, sizes, multiply, kernels.data.shape)
    limits = jnp.array([format.max for format in static.formats], jnp.float32)
    update = jax.vmap(scaling.of_recipe(static.recipe).update, (0, 0, None))
    new_state = {**state, **update(state, jnp.stack([*seen, grad_seen], axis=1), limits)}
    drhs, scale = _kernel_grad(static, drhs)
    new_state = without_wgrad_scale(new_state) if scale is None else {**new_state, "wgrad_scale": scale}
    return dlhs, drhs, new_state


def _kernel_grad(static: _Static, drhs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the kernels in the dtype of the slot or of rhs; for an FP8 slot E4M3 codes, and a scale
    for each group."""
    as_codes = static.grad_slot_dtype == FP8_GRAD
    if static.grad_slot_dtype is not None:
        drhs = jax.vmap(functools.partial(static.placement.scattered, as_codes=as_codes))(drhs)
    if as_codes:
        q = drhs if isinstance(drhs, ScaledArray) else quantize_gradient(drhs, (drhs.shape[0], 1, 1))
        return q.data, q.scale.reshape(-1)
    dtype = static.rhs_dtype if static.grad_slot_dtype is None else static.grad_slot_dtype
    return drhs.astype(dtype or jnp.float32), None


def _forward_rule(static: _Static, *operands: Any) -> tuple[jax.Array, Any]:
    return _forward(static, *checked(*operands))


_ragged.defvjp(_forward_rule, _backward, symbolic_zeros=True)
_jitted = jax.jit(_ragged, static_argnums=0)


def _quantize_rows(
    static: _Static, operand: int, x: jax.Array, state: State, sizes: jax.Array
) -> tuple[jax.Array, Operand]:
    """The amax of each group's rows, shape=(groups,), and the rows quantized with their groups' scales."""
    groups, format = sizes.shape[0], static.formats[operand]
    group = groups_of_rows(sizes, x.shape[0])
    # Rows past the last group are dropped; a group without rows has amax 0.
    of_rows = amax(x, (x.shape[0], 1)).reshape(-1)
    seen = jnp.zeros(groups, jnp.float32).at[group].max(of_rows, mode="drop")
    scale = _scales(static, operand, seen, state)
    with jax.named_scope(CASTS[operand]):
        of_row = jnp.take(scale, group, mode="clip")[:, None]
        q = stored(ScaledArray(quantize(x, format, of_row).data, scale), format)
    return seen, Operand(packed(q).data, scale)


def _quantize_kernels(static: _Static, rhs: Any, state: State) -> tuple[jax.Array, Operand]:
    """The amax of each kernel, shape=(groups,), and the quantized kernels.

    A `ScaledArray` in the GEMM's format with a scale for each group is not quantized again.
    """
    format, groups = static.formats[1], rhs.shape[0]
    if isinstance(rhs, ScaledArray) and rhs.data.dtype == format.dtype and rhs.scale.size == groups:
        scale = rhs.scale.reshape(-1).astype(jnp.float32)
        return scale * format.max, Operand(packed(rhs).data, scale)  # an upper bound of the amax
    seen = amax(rhs, (groups, 1, 1)).reshape(-1)
    seen = static.placement.common_amax(seen)
    scale = _scales(static, 1, seen, state)
    with jax.named_scope(CASTS[1]):
        q = stored(quantize(rhs, format, scale[:, None, None]), format)
    return seen, Operand(packed(q).data, scale)


def _scales(static: _Static, operand: int, seen: jax.Array, state: State) -> jax.Array:
    """The scale of each group, shape=(groups,)."""
    chosen = scaling.of_recipe(static.recipe).scale
    limit = static.formats[operand].max
    return jax.vmap(lambda state, amax: chosen(state, operand, amax, limit))(state, seen)


def _whole(static: _Static, kernels: Operand) -> Operand:
    """All-gathers the kernels."""
    return kernels._replace(data=static.placement.gathered(kernels.data))


def _multiply(
    static: _Static, left: int, right: int, spec: str, dtype: Any, *, precise: bool
) -> Callable[[Operand, Operand], jax.Array]:
    """The GEMM of one block, with operands number `left` and `right`: in FP8 if both are quantized, otherwise
    in high precision."""
    first, second = spec.split(",")
    (letter,) = set(first) & set(second)
    numbers = (((first.index(letter),), (second.index(letter),)), ((), ()))

    def multiply(lhs: Operand, rhs: Operand) -> jax.Array:
        if lhs.scale is None or rhs.scale is None:  # then both are high precision
            out = lax.dot_general(lhs.data, rhs.data, numbers, preferred_element_type=jnp.float32)
            return out.astype(dtype)
        dot = backends.BACKENDS[static.backend].dot
        return dot(
            _codes(static, lhs, left), _codes(static, rhs, right), numbers, out_dtype=dtype, precise=precise
        )

    return multiply


def _codes(static: _Static, x: Operand, operand: int) -> ScaledArray:
    return ScaledArray(lax.bitcast_convert_type(x.data, static.formats[operand].dtype), x.scale)
