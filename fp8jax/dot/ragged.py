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

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax import backends, scaling
from fp8jax.dot.dot_general import check_state, init_state, state_names
from fp8jax.dot.layout import Side, contract
from fp8jax.dot.row_tiles import (
    ExpertSharding,
    Multiply,
    columns_times_columns,
    on_each,
    rows_times_matrices,
    rows_times_rows,
)
from fp8jax.dot.vjp import OPERANDS_OF, WGRAD, DotCall, StaticArgs, jitted_dot, multiply
from fp8jax.dot.weight import Weight
from fp8jax.platforms import jvp_of
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.scaling import State
from fp8jax.scaling.base import QuantizedRows
from fp8jax.scaling.merge import broadcast_under_vmap, to_fm32


def init_ragged_state(recipe: Recipe | str, groups: int) -> State:
    """The scaling state of one `ragged_dot`: the state of a dot for each group, stacked along the first axis.

    Args:
        recipe: a `Recipe`, or its text.
        groups: the number of kernels.
    """
    state = init_state(recipe)
    return {name: jnp.broadcast_to(x, (groups, *x.shape)) for name, x in state.items()}


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
        TypeError: `lhs` or `rhs` is an array of integers or complex numbers, or `lhs` a `ScaledArray`.
        ValueError: `recipe.gemm` is neither "FP8" nor "FP4", `state` is of another recipe or another number
            of groups, or the shapes do not match.
    """
    weight = Weight.of(rhs)
    kernel, grad_slot = weight.value, weight.grad_slot
    _check_shapes(lhs.shape, weight.shape, group_sizes.shape)
    chosen = backends.choose(backend, scaling.of_recipe(Recipe.parse(recipe)).granularity).name
    static = StaticArgs.of(lhs, weight, recipe, chosen, out_dtype, Grouped(over))
    check_state(static.recipe, state)
    _check_groups(static.recipe, state, weight.shape[0])
    state, grad_slot = broadcast_under_vmap(
        (to_fm32(dict(state)), grad_slot), lhs, group_sizes, *jax.tree.leaves(kernel)
    )
    return jitted_dot(static, lhs, kernel, grad_slot, state, group_sizes)


def _check_shapes(lhs: Any, rhs: Any, sizes: Any) -> None:
    if len(lhs) != 2 or len(rhs) != 3 or lhs[1] != rhs[1] or sizes != rhs[:1]:
        raise ValueError(
            "expected `lhs` (rows, k), `rhs` (groups, k, n) and `group_sizes` (groups,); got "
            f"{tuple(lhs)}, {tuple(rhs)} and {tuple(sizes)}."
        )


def _check_groups(recipe: Recipe, state: State, groups: int) -> None:
    for name in state_names(recipe):
        if state[name].shape[:1] != (groups,):
            raise ValueError(
                f"`state`: expected {name} of {groups} groups, as `rhs` has; got shape {state[name].shape}. "
                f"Make the state with `init_ragged_state(recipe, {groups})`."
            )


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The matmuls of rows that are sorted by group; see `fp8jax.dot.vjp.Matmul` for the methods.

    Kernels are quantized once for each GEMM, and so are rows, unless they share a scale of the tensor: those
    are quantized within the GEMMs of `fp8jax.dot.row_tiles`, whose tiles then have a scale each.
    """

    over: ExpertSharding | None

    def on_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `Matmul`."""
        return on_each(function, self.over)

    def rows(self, lhs: jax.Array) -> jax.Array:
        """See `Matmul`."""
        return lhs

    def side(self, sharding: Any, rhs: Any) -> Side:
        """See `Matmul`."""
        shape = sharding.whole_shape(rhs.shape)
        return Side(shape, (0, 1, 2), shape)

    def quantize(self, call: DotCall, operand: int, x: jax.Array, uses: Any) -> QuantizedRows:
        """See `Matmul`."""
        return call.static.scaling.quantize_rows(call.state, operand, x, call.others, uses)

    def groups(self, others: jax.Array) -> int:
        """See `Matmul`."""
        return others.shape[0]

    def saved(self, others: jax.Array) -> jax.Array:
        """See `Matmul`."""
        return others

    def times_kernel(
        self, call: DotCall, gemm: str, rows: Any, kernel: Any, of_rows: jax.Array, to: Any
    ) -> jax.Array:
        """See `Matmul`."""
        one = _tile_gemm(call, gemm, call.static.out_dtype, (None, to.shape[1]))
        multiple = call.static.scaling.rows_multiple
        options: dict[str, Any] = {}
        if is_scaled(rows) and multiple != 1:
            options = {"aligned": of_rows, "least": multiple}
        elif multiple is None:
            options = {"is_separate": True}
        return rows_times_matrices(rows, kernel, call.others, one, to, **options)

    def wgrad(self, call: DotCall, lhs: Any, grad: Any, of_rows: jax.Array, side: Side) -> jax.Array:
        """See `Matmul`."""
        one = _tile_gemm(call, WGRAD, jnp.float32, side.matrix[1:])
        if is_scaled(lhs) and call.static.scaling.rows_multiple != 1:
            return columns_times_columns(lhs, grad, of_rows, one, side.matrix)
        return rows_times_rows(lhs, grad, call.others, one, side.matrix)

    def for_groups(self, update: Callable[..., State]) -> Callable[..., State]:
        """See `Matmul`."""
        return jax.vmap(update)


def _tile_gemm(call: DotCall, gemm: str, dtype: Any, shape: Any) -> Multiply:
    """The GEMM of one tile of rows, without the padding to whole blocks.

    `shape` of the output has None for the rows of lhs.
    """
    static, of_first = call.static, jax.tree.map(lambda leaf: leaf[0], call.state)

    def quantized(number: int, x: Any) -> Any:
        if is_scaled(x) or static.is_high(gemm):
            return x
        operand, use = OPERANDS_OF[gemm][number]
        return static.scaling.quantize(of_first, operand, x, (use == 0, use == 1))[0][use]

    def one(lhs: Any, rhs: Any) -> jax.Array:
        rows = lhs.shape[0] if shape[0] is None else shape[0]
        out = multiply(static, gemm, quantized(0, lhs), quantized(1, rhs), dtype)
        return out[:rows, : shape[1]]

    return one


# In high precision ##################################################################################

# A primitive, so that `rewrite` finds it as one equation of a jaxpr.
RAGGED = "fp8jax_ragged_dot"
_ragged_p = jex.Primitive(RAGGED)


def high_precision_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, over: ExpertSharding | None = None
) -> jax.Array:
    """`lax.ragged_dot(lhs, rhs, group_sizes)` in high precision, accumulated in float32.

    On CPU and GPU, XLA computes `jax.lax.ragged_dot` as a matmul of every row with every group's matrix: work
    and memory grow with the number of groups. This computes it in tiles of rows, as `ragged_dot` does.

        >>> high_precision_ragged_dot(jnp.ones((3, 4)), jnp.ones((2, 4, 5)), jnp.array([1, 2])).shape
        (3, 5)

    Args:
        lhs: float array, shape=(rows, k), with the rows sorted by group.
        rhs: float array, shape=(groups, k, n).
        group_sizes: integers, shape=(groups,). Rows past their sum have output 0 and no gradient.
        over: the mesh axis that shards the groups, as in `ragged_dot`.

    Returns:
        Array of shape (rows, n), in the promoted dtype. It supports reverse mode, but not forward mode.
    """
    if over is not None and jax.sharding.get_abstract_mesh().empty:
        # `jax.jit` reads the devices of a program from its equations, but not from the lowering of this one.
        lhs = lax.with_sharding_constraint(lhs, NamedSharding(over.mesh, P(P.UNCONSTRAINED, P.UNCONSTRAINED)))
    return _ragged_p.bind(lhs, rhs, group_sizes, over=over)


@_ragged_p.def_impl
def _ragged_high(lhs: Any, rhs: Any, group_sizes: Any, *, over: ExpertSharding | None) -> jax.Array:
    return on_each(_high_on_device, over)(lhs, rhs, group_sizes)


@_ragged_p.def_abstract_eval
def _abstract(lhs: Any, rhs: Any, group_sizes: Any, *, over: ExpertSharding | None) -> Any:
    del group_sizes, over
    return jax.core.ShapedArray((lhs.shape[0], rhs.shape[2]), jnp.promote_types(lhs.dtype, rhs.dtype))


ad.primitive_jvps[_ragged_p] = jvp_of(_ragged_high)
mlir.register_lowering(_ragged_p, mlir.lower_fun(_ragged_high, multiple_results=False))


@jax.custom_vjp
def _high_on_device(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[2]), jnp.promote_types(lhs.dtype, rhs.dtype))
    return rows_times_matrices(lhs, rhs, group_sizes, _gemm("mk,kn"), shape)


def _high_backward(residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = residuals
    like = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype)
    dlhs = rows_times_matrices(grad, rhs, sizes, _gemm("mn,kn"), like)
    drhs = rows_times_rows(lhs, grad, sizes, _gemm("mk,mn"), rhs.shape)
    return dlhs, drhs.astype(rhs.dtype), None


_high_on_device.defvjp(lambda *operands: (_high_on_device(*operands), operands), _high_backward)


def _gemm(spec: str) -> Multiply:
    """A GEMM with float32 output."""
    numbers = contract(spec)
    return lambda lhs, rhs: lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)
