"""FP8 `dot_general` and `einsum`, their scaling state, and a remat policy for their residuals."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import backends, scaling
from fp8jax.dot.layout import Layout, Side, einsum_by, is_single_dot
from fp8jax.dot.output import OPERANDS
from fp8jax.dot.vjp import FPROP, WGRAD, DotCall, StaticArgs, jitted_dot, multiply
from fp8jax.dot.weight import WHOLE, Weight
from fp8jax.platforms import explicit_mesh, with_auto_axes, with_sharding
from fp8jax.quantization import Computed, Expression, ScaledArray, as_codes, is_scaled, value
from fp8jax.recipe import Recipe
from fp8jax.scaling import LHS, RHS, State
from fp8jax.scaling.base import KernelMatrix, QuantizedRows
from fp8jax.scaling.delayed import ONE
from fp8jax.scaling.merge import broadcast_under_vmap, to_fm32


@dataclasses.dataclass(frozen=True)
class Whole:
    """The matmuls of whole matrices; see `fp8jax.dot.vjp.Matmul` for the methods."""

    layout: Layout
    expression: Expression | None = None  # of lhs as a matrix; its inputs are the call's `others`

    def on_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `Matmul`."""
        return function

    def rows(self, lhs: jax.Array) -> jax.Array:
        """See `Matmul`."""
        return self.layout.lhs.to_matrix(lhs)

    def side(self, sharding: Any, rhs: Any) -> Side:
        """See `Matmul`."""
        del sharding, rhs
        return self.layout.rhs

    def quantize(self, call: DotCall, operand: int, x: jax.Array, uses: Any) -> QuantizedRows:
        """See `Matmul`."""
        matrix: Any = Computed(x, self.expression, call.others) if self.expression and operand == LHS else x
        (first, second), seen = call.static.scaling.quantize(call.state, operand, matrix, uses)
        return QuantizedRows(first, second, seen, None)

    def groups(self, others: Any) -> int:
        """See `Matmul`."""
        del others
        return 0

    def saved(self, others: Any) -> None:
        """See `Matmul`."""

    def times_kernel(
        self, call: DotCall, gemm: str, rows: Any, kernel: Any, of_rows: None, to: Any
    ) -> jax.Array:
        """See `Matmul`."""
        del of_rows
        static, is_batched = call.static, self.layout.is_batched
        out = multiply(static, gemm, rows, kernel, static.out_dtype, is_batched=is_batched)
        out = _trimmed(out, to.shape)
        return out if gemm == FPROP else self.layout.lhs.to_tensor(out).astype(to.dtype)

    def wgrad(self, call: DotCall, lhs: Any, grad: Any, of_rows: None, side: Side) -> jax.Array:
        """See `Matmul`."""
        del of_rows
        static, is_batched = call.static, self.layout.is_batched
        out = multiply(static, WGRAD, lhs, grad, static.wgrad_dtype, is_batched=is_batched)
        return side.to_tensor(_trimmed(out, side.matrix))

    def for_groups(self, update: Callable[..., State]) -> Callable[..., State]:
        """See `Matmul`."""
        return update


def _trimmed(out: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A product of operands that were padded to whole blocks, without the padding."""
    return out if out.shape == shape else out[..., : shape[-2], : shape[-1]]


def init_state(recipe: Recipe | str) -> State:
    """The scaling state of one dot, a dict of float32 arrays; empty for stateless scaling.

    Args:
        recipe: a `Recipe`, or its text.

    Returns:
        The state of the recipe's scaling for the operands lhs, rhs and grad, in this order (see
        `fp8jax.scaling.delayed`).
    """
    recipe = Recipe.parse(recipe)
    return scaling.of_recipe(recipe).init() if recipe.is_quantized else {}


@functools.cache
def state_ranks(recipe: Recipe) -> dict[str, int]:
    """The names of the arrays that a state must have, sorted, and the ranks of the arrays."""
    state = jax.eval_shape(lambda: init_state(recipe))
    return {name: state[name].ndim for name in sorted(state) if name != ONE}


def state_names(recipe: Recipe) -> tuple[str, ...]:
    """The names of the arrays that a state must have, sorted."""
    return tuple(state_ranks(recipe))


def check_state(
    recipe: Recipe,
    state: Mapping[str, Any],
    name: str = "state",
    at: str = "",
    remedy: str = "Make the state with `fp8jax.dot.init_state(recipe)`, or `init_ragged_state`.",
) -> None:
    """Raises ValueError if the scaling state of a dot lacks an array that the scaling of the recipe needs, or
    has amax histories of another length.

    Args:
        recipe, state: of the dot.
        name, at, remedy: for the message: the argument, the state's place in it, and how to get a state.
    """
    wanted = state_names(recipe)
    if missing := sorted(set(wanted) - set(state)):
        got = ", ".join(sorted(state)) or "nothing"
        raise ValueError(
            f"`{name}`: expected {', '.join(wanted)}{at} for {recipe}; got {got}, without {missing[0]!r}: "
            f"the state of another recipe. {remedy}"
        )
    length = state["amax_history"].shape[-1] if "amax_history" in wanted else recipe.amax_history_len
    if length != recipe.amax_history_len:
        raise ValueError(
            f"`{name}`: expected amax_history_len={recipe.amax_history_len}{at} for {recipe}; got {length}. "
            f"Take a recipe with amax_history_len={length}, or another state. {remedy}"
        )


def dot_general(
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    recipe: Recipe | str,
    state: State,
    out_dtype: Any = None,
    backend: str = "auto",
    out_sharding: Any = None,
    computed: Callable[[Any], Computed] | None = None,
) -> jax.Array:
    """`lax.dot_general` with its forward and backward GEMMs in FP8.

    Args:
        lhs: the activations, a float array.
        rhs: the kernel: a float array, `ScaledArray` or `Weight`. A `ScaledArray` in the GEMM's format with a
            single scale is used without another cast.
        dimension_numbers: as in `jax.lax.dot_general`; batch dims are allowed, any dim may be 0.
        recipe: a `Recipe`, or its text; its `gemm` must be "FP8" or "FP4".
        state: scaling state of this dot, see `init_state`; each dot needs a state of its own. The gradient
            with respect to it is the next state, by `jax.value_and_grad`. `fp8jax.value_and_grad` of Flax
            variables with the state in "_overwrite_with_gradient" returns it in the variables.
        out_dtype: dtype of the output; by default the promoted dtype of lhs and rhs.
        backend: see `fp8jax.backends`.
        out_sharding: sharding of the output, a `PartitionSpec` or a sharding.
        computed: how `lhs`, given as a matrix, is computed, for a scaling that `takes_computed`.

    Returns:
        Array of `lax.dot_general`'s shape. The gradient of `lhs` has lhs's dtype, of a float `rhs` rhs's
        dtype; the gradient of a `Weight` is in its `grad_slot`, and the gradient of `state` is the new state.

    Raises:
        TypeError: `lhs` or `rhs` is an array of integers or complex numbers, or `lhs` a `ScaledArray`.
        ValueError: `recipe.gemm` is not "FP8" or "FP4", `state` is of another recipe, `dimension_numbers` do
            not fit the shapes, or the backend does not support this dot here.
    """
    recipe = Recipe.parse(recipe)
    weight = Weight.of(rhs)
    kernel, grad_slot = weight.value, weight.grad_slot
    layout = Layout.of(lhs.shape, weight.shape, dimension_numbers)
    granularity = scaling.of_recipe(recipe).granularity
    chosen = backends.choose(backend, granularity, is_batched=layout.is_batched).name
    whole, inputs = Whole(layout), None
    if computed is not None and layout.is_rows_of_lhs:
        made = computed(jax.ShapeDtypeStruct(layout.lhs.matrix, lhs.dtype))
        whole, inputs = Whole(layout, made.expression), made.inputs
    static = StaticArgs.of(lhs, weight, recipe, chosen, out_dtype, whole)
    check_state(recipe, state)
    state, grad_slot = broadcast_under_vmap((to_fm32(dict(state)), grad_slot), lhs, *jax.tree.leaves(kernel))

    def multiplied(lhs: Any, kernel: Any, grad_slot: Any, state: Any, inputs: Any) -> jax.Array:
        out: Any = jitted_dot(static, lhs, kernel, grad_slot, state, inputs)
        return out.reshape(layout.out_shape)

    def like(lhs: Any, kernel: Any, grad_slot: Any, state: Any, inputs: Any) -> jax.Array:
        del grad_slot, state, inputs
        a, b = (x.astype(jnp.float32) for x in (lhs, kernel.data if is_scaled(kernel) else kernel))
        return lax.dot_general(a, b, dimension_numbers)

    operands = (lhs, kernel, grad_slot, state, inputs)
    out = with_auto_axes(multiplied, like if out_sharding is None else out_sharding, *operands)
    if out_sharding is None or explicit_mesh(operands):
        return out
    return with_sharding(out, out_sharding)


def einsum(
    subscripts: str,
    lhs: jax.Array,
    rhs: Any,
    *,
    recipe: Recipe | str,
    state: State,
    out_dtype: Any = None,
    backend: str = "auto",
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.einsum` of two operands with its GEMMs in FP8.

    Args:
        subscripts: with "->". One `dot_general` and a transpose must compute the einsum: no repeated letter
            in an operand, no letter summed in one operand only. lhs and the output may have "...".
        lhs, rhs, recipe, state, out_dtype, backend, out_sharding: see `dot_general`.

    Raises:
        ValueError: the einsum is not a single dot product, or does not fit the shapes; see `dot_general`.
    """
    subscripts = subscripts.replace(" ", "")
    if not is_single_dot(subscripts):
        raise ValueError(
            f"`subscripts`: expected an einsum that is one dot product of two operands, with '->'; got "
            f"{subscripts!r}. Sum or take diagonals before it."
        )
    options = {"recipe": recipe, "state": state, "out_dtype": out_dtype, "backend": backend}
    return einsum_by(subscripts, lhs, rhs, functools.partial(dot_general, **options), out_sharding)


def save_fp8_operands(primitive: Any, *avals: Any, **params: Any) -> Any:
    """A policy for `jax.checkpoint` and `nn.remat` that saves the FP8 operands of each dot.

    The backward recomputes everything between the dots. It recomputes a dot's output only if an operation
    other than the next dot needs it, by an FP8 GEMM of the saved operands. No tensor is cast twice. A saved
    activation takes 1 byte per entry, in a bf16 model 2. To save more, combine policies with
    `jax.checkpoint_policies.save_from_both_policies`.

    Under block scaling the saved operands are those of the weight gradient's GEMM. The forward's, which have
    other blocks, are cast again for a dot whose output is recomputed.

    The arguments are those of a `jax.checkpoint` policy.
    """
    return _save_operands(primitive, *avals, **params)


_save_operands = jax.checkpoint_policies.save_only_these_names(OPERANDS)


# A kernel that is not sharded, as `Scaling.prepare` needs it.
_AS_STORED = KernelMatrix(Side((), (), ()), WHOLE)


def quantized_kernel(kernel: Any, recipe: Recipe, state: State, rank: int) -> ScaledArray:
    """A kernel quantized once for many forward GEMMs.

    Args:
        kernel: float array or `ScaledArray`, shape=(*stack, ...).
        recipe: its `gemm` must be "FP8" or "FP4".
        state: the dot's scaling state, with the axes of `stack` in front; {} for stateless scaling.
        rank: the rank of one kernel of the stack.

    Returns:
        A `ScaledArray` in the GEMM's forward format, with a scale for each kernel of the stack; under block
        scaling the kernel as it is.
        `dot_general` computes the same output with it as with `kernel`.
    """
    chosen = scaling.of_recipe(recipe)
    is_quantized = isinstance(kernel, ScaledArray) and kernel.data.dtype == chosen.format(RHS).dtype
    if is_quantized or not chosen.is_residual_quantized:
        return kernel

    def one(kernel: jax.Array, state: State) -> ScaledArray:
        q, _ = chosen.prepare(state, kernel, _AS_STORED, 0)
        return as_codes(q, chosen.format(RHS))

    for _ in range(kernel.ndim - rank):
        one = jax.vmap(one)
    q = one(value(kernel), state)
    blocks = (*q.scale.shape, *(1,) * rank)
    return ScaledArray(q.data, q.scale.reshape(blocks))
