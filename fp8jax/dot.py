"""A dot product whose three GEMMs run in FP8, for JAX's autodiff.

    y  = lhs . rhs       E4M3 x E4M3, fast accumulation
    dx = dy  . rhs^T     E5M2 x E4M3, precise accumulation
    dw = lhs^T . dy      E4M3 x E5M2, precise accumulation

    >>> import jax, jax.numpy as jnp
    >>> from fp8jax import Recipe
    >>> from fp8jax.dot import dot_general, init_state
    >>> recipe = Recipe.parse("te")
    >>> x, w = jnp.ones((4, 16)), jnp.ones((16, 32))
    >>> y = dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, state=init_state(recipe))
    >>> float(y[0, 0])
    16.0

What the backward needs is kept in FP8. The new scaling state leaves as the cotangent of
`state`, since only the backward sees the amax of `dy`: "overwrite with gradient".
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fp8jax import backends, contraction, formats, scaling
from fp8jax.comm.gather import whole_of
from fp8jax.comm.reduce import part_of_sum
from fp8jax.comm.zero import Spread
from fp8jax.layout import Layout
from fp8jax.platforms import by_platform, explicit_mesh, with_auto_axes, with_sharding
from fp8jax.recipe import Recipe
from fp8jax.scaled import (
    ScaledArray,
    amax,
    is_scaled,
    quantize,
    quantize_gradient,
    to_bytes,
    value,
    without_infinities,
)
from fp8jax.scaling.merge import CODES, NeedsWideGradient, along, from_max, to_codes, to_max

OPERANDS = ("lhs", "rhs", "grad")

State = dict[str, jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("value", "slot"), meta_fields=("spread",))
@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A kernel on its way through a loss, with the place its gradient comes out of.

    A narrow kernel has no cotangent of its own worth having: that of a float16 array is
    float16. `slot` is a zero array of the kernel's shape, never read by `dot_general`; its
    cotangent is the gradient with respect to the kernel's value, as float32 or as E4M3 codes
    whose scale leaves through the dot's state.
    """

    value: Any  # ScaledArray or float array
    slot: Any  # shape=kernel's, float32 or merge.CODES
    spread: Spread | None = None  # over devices; then the slot is this device's part

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return self.spread.whole(self.value.shape) if self.spread else self.value.shape

    @property
    def ndim(self) -> int:
        """The kernel's rank."""
        return self.value.ndim

    def dequantize(self) -> jax.Array:
        """The value as a float32 array that gradients flow through."""
        if self.slot.dtype == CODES:
            raise NeedsWideGradient
        if self.spread:
            return _spread_value(self.spread, value(self.value).astype(jnp.float32), self.slot)
        return lax.stop_gradient(value(self.value)).astype(jnp.float32) + self.slot

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __getitem__(self, index: Any) -> Any:
        """Itself for `...`, else a part of the dequantized value."""
        return self if index is ... else self.dequantize()[index]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread_value(spread: Spread, kernel: jax.Array, slot: jax.Array) -> jax.Array:
    """A kernel whole, whose gradient leaves through the slot as this device's part."""
    del slot
    return whole_of(kernel, spread) if spread.is_part else kernel


_spread_value.defvjp(
    lambda spread, kernel, slot: (_spread_value(spread, kernel, slot), jnp.zeros_like(kernel, kernel.dtype)),
    lambda spread, zeros, grad: (zeros, part_of_sum(grad, spread, _WIDE, as_codes=False)),
)
_WIDE = Recipe.parse("fp32")


class _Static(NamedTuple):
    """What is known when the dot is traced."""

    recipe: Recipe
    backend: str
    layout: Layout
    lhs_dtype: Any
    rhs_dtype: Any  # None: no float array, its gradient is float32 if it has one
    slot_dtype: Any  # None: the gradient is that of rhs itself
    out_dtype: Any
    spread: Spread | None  # of the kernel over devices

    @property
    def formats(self) -> list[formats.Format]:
        """The formats of `OPERANDS`."""
        forward, backward = map(formats.get, self.recipe.gemm_formats)
        return [forward, forward, backward]


def init_state(recipe: Recipe | str) -> State:
    """The scaling state of one dot, a dict of float32 arrays; empty if nothing is kept.

    Args:
        recipe: a `Recipe`, or the text of one.

    Returns:
        What the recipe's scaling keeps for the operands lhs, rhs and grad, in this order
        (see `fp8jax.scaling.delayed`), and where the weight gradient is FP8 its last scale,
        `wgrad_scale`, shape ().
    """
    recipe = Recipe.parse(recipe)
    state = scaling.of_recipe(recipe).init(len(OPERANDS))
    if recipe.weight_grad == "E4M3":
        state["wgrad_scale"] = jnp.ones((), jnp.float32)
    return state


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
) -> jax.Array:
    """`lax.dot_general` whose GEMMs run in FP8 as the recipe's `gemm` column says.

    Args:
        lhs: float array: the input.
        rhs: the kernel: float array, `ScaledArray`, or `Weight`. One that is kept in the format
            that the GEMM takes, on a single scale, goes to it as it is.
        dimension_numbers: as in `jax.lax.dot_general`; batch dims allowed, any dim may be 0.
        recipe: a `Recipe`, or the text of one; its `gemm` must be "FP8".
        state: scaling state of this dot, see `init_state`. Without one of its own a product has
            no memory: `jax.value_and_grad` with respect to it, or `fp8jax.value_and_grad` of Flax
            variables that hold it in "_overwrite_with_gradient", gives the next one.
        out_dtype: dtype of the output; by default the promoted dtype of lhs and rhs.
        backend: see `fp8jax.backends`.
        out_sharding: of the output, a `PartitionSpec` or a sharding.

    Returns:
        Array of `lax.dot_general`'s shape. Its gradients: for `lhs` in lhs's dtype, for a
        float `rhs` in rhs's dtype, for a `Weight` in its slot, and for `state` the new state.

    Raises:
        ValueError: `recipe.gemm` is not "FP8".
    """
    recipe = Recipe.parse(recipe)
    if recipe.gemm != "FP8":
        raise ValueError(f"`recipe`: expected gemm=FP8 for an FP8 dot; got gemm={recipe.gemm}.")
    weight = rhs if isinstance(rhs, Weight) else Weight(rhs, None)
    kernel, slot = weight.value, weight.slot
    rhs_dtype = None if isinstance(kernel, ScaledArray) else kernel.dtype
    if out_dtype is None:
        out_dtype = jnp.promote_types(lhs.dtype, rhs_dtype or jnp.float32)
    layout = Layout.of(lhs.shape, weight.shape, dimension_numbers)
    slot_dtype = None if slot is None else slot.dtype
    dtypes = (lhs.dtype, rhs_dtype, slot_dtype, jnp.dtype(out_dtype))
    static = _Static(recipe, backend, layout, *dtypes, weight.spread)
    state, slot = along((to_max(state), slot), lhs, *jax.tree.leaves(kernel))

    def multiplied(lhs: Any, kernel: Any, slot: Any, state: Any) -> jax.Array:
        out: Any = _jitted_dot(static, lhs, kernel, slot, state)
        return out.reshape(layout.out_shape)

    def like(lhs: Any, kernel: Any, slot: Any, state: Any) -> jax.Array:
        del slot, state
        a, b = (x.astype(jnp.float32) for x in (lhs, kernel.data if is_scaled(kernel) else kernel))
        return lax.dot_general(a, b, dimension_numbers)

    operands = (lhs, kernel, slot, state)
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
    """`jnp.einsum` of two operands whose GEMMs run in FP8.

    Args:
        subscripts: with "->", and such that one `dot_general` and a transpose make it: no letter
            twice in an operand, none summed in one operand alone; lhs may have "...".
        lhs, rhs, recipe, state, out_dtype, backend, out_sharding: see `dot_general`.

    Raises:
        ValueError: the einsum is no single dot product.
    """
    subscripts = subscripts.replace(" ", "")
    if not contraction.is_dot(subscripts):
        raise ValueError(
            f"`subscripts`: expected an einsum that is one dot product of two operands, with '->'; got "
            f"{subscripts!r}. Sum or take diagonals before it."
        )
    options = {"recipe": recipe, "state": state, "out_dtype": out_dtype, "backend": backend}
    return contraction.einsum(subscripts, lhs, rhs, functools.partial(dot_general, **options), out_sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(static: _Static, lhs: jax.Array, rhs: Any, slot: Any, state: State) -> jax.Array:
    return _forward(static, lhs, rhs, slot, state)[0]


def _forward(static: _Static, lhs: jax.Array, rhs: Any, slot: Any, state: State) -> tuple[jax.Array, Any]:
    """The output, and what the backward needs."""
    del slot
    fprop_is_high, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    state = from_max(state)
    lhs_seen, q_lhs = _quantize(static, 0, lhs, state)
    rhs_seen, q_rhs = _quantize(static, 1, rhs, state)
    narrow_lhs, wide_lhs = (static.layout.lhs_matrix(x) for x in (q_lhs, lhs.astype(static.out_dtype)))
    wide_rhs = value(rhs).astype(static.out_dtype)
    operands = (wide_lhs, wide_rhs) if fprop_is_high else (narrow_lhs, q_rhs)
    out = _multiply(static, operands[0], _kernel_matrix(static, operands[1]), "mk,kn", precise=False)
    # Of a kernel that is spread over devices the part is kept, and put together again.
    kept = (
        wide_lhs if wgrad_is_high else _packed(narrow_lhs),
        wide_rhs if dgrad_is_high else _packed(q_rhs),
    )
    return out, (kept, (lhs_seen, rhs_seen), state)


def _kernel_matrix(static: _Static, rhs: Any) -> Any:
    """The whole kernel as a matrix."""
    if static.spread and static.spread.is_part:
        rhs = whole_of(rhs, static.spread)
    return static.layout.rhs_matrix(rhs)


def _backward(static: _Static, kept: Any, grad: jax.Array) -> tuple[Any, ...]:
    operands, seen, state = kept
    if isinstance(grad, SymbolicZero):  # the output is not used
        grad = jnp.zeros(grad.shape, grad.dtype)
    if static.spread and static.spread.is_part:
        # Not before there is a gradient to multiply with: the kernel is not to wait in memory.
        operands, grad = lax.optimization_barrier((operands, grad))
    lhs, rhs = (_unpacked(operand, static.formats[0]) for operand in operands)
    rhs = _kernel_matrix(static, rhs)
    _, dgrad_is_high, wgrad_is_high = static.recipe.override_linear_precision
    grad = without_infinities(grad)
    grad_seen, q_grad = _quantize(static, 2, grad, state)
    dlhs = _multiply(static, grad if dgrad_is_high else q_grad, rhs, "mn,kn", precise=True)
    drhs = _multiply(static, lhs, grad if wgrad_is_high else q_grad, "mk,mn", precise=True)
    dlhs = static.layout.lhs_tensor(dlhs).astype(static.lhs_dtype)
    drhs = static.layout.rhs_tensor(drhs)
    limits = jnp.array([format.max for format in static.formats], jnp.float32)
    update = scaling.of_recipe(static.recipe).update
    new_state = {**state, **update(state, jnp.stack([*seen, grad_seen]), limits)}
    in_rhs, in_slot = None, None
    if static.slot_dtype is not None and static.spread:
        drhs = part_of_sum(drhs, static.spread, static.recipe, as_codes=static.slot_dtype == CODES)
    if static.slot_dtype == CODES:
        q_drhs = drhs if isinstance(drhs, ScaledArray) else quantize_gradient(drhs)
        in_slot, new_state["wgrad_scale"] = to_codes(q_drhs.data), q_drhs.scale
    elif static.slot_dtype is not None:
        in_slot = drhs.astype(static.slot_dtype)
    elif static.rhs_dtype is not None:
        in_rhs = drhs.astype(static.rhs_dtype)
    return dlhs, in_rhs, in_slot, to_max(new_state)


def _forward_rule(static: _Static, *operands: Any) -> tuple[jax.Array, Any]:
    """`_forward` of what is differentiated, which says so for each array."""

    def is_perturbed(tree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(tree))

    lhs, rhs, slot, state = jax.tree.map(lambda leaf: leaf.value, operands)
    _, of_rhs, of_slot, of_state = map(is_perturbed, operands)
    if of_rhs and isinstance(rhs, ScaledArray):
        raise TypeError(
            f"a scaled weight, {rhs.data.dtype}{list(rhs.shape)}, has no gradient of its own: expected "
            "`fp8jax.value_and_grad` (which takes Flax variables and NNX modules); got JAX's or NNX's own."
        )
    if state and (of_rhs or of_slot) and not of_state:
        warnings.warn(
            "a gradient is taken with respect to weights but not to the FP8 scaling state: its new amaxes "
            "are lost. Take it with `fp8jax.value_and_grad`, of all of the variables.",
            stacklevel=2,
        )
    return _forward(static, lhs, rhs, slot, state)


_dot.defvjp(_forward_rule, _backward, symbolic_zeros=True)

# A model has many products of one kind: jitted, they are traced and differentiated once.
_jitted_dot = jax.jit(_dot, static_argnums=0)


def _quantize(static: _Static, operand: int, x: Any, state: State) -> tuple[jax.Array, ScaledArray]:
    """The amax of `x`, and `x` in FP8 on the scale that its scaling chooses; or as it is, if it is FP8."""
    format = static.formats[operand]
    if isinstance(x, ScaledArray) and x.data.dtype == format.dtype and x.scale.size == 1:
        scale = x.scale.reshape(())
        return scale * format.max, ScaledArray(x.data, scale)  # the largest that it could be
    seen = amax(x)
    if operand == 1 and static.spread and static.spread.is_part:
        seen = lax.pmax(seen, static.spread.axis_name)  # parts are to be put together
    q = quantize(x, format, scaling.of_recipe(static.recipe).scale(state, operand, seen, format.max))
    packed = by_platform(_packed(q), cpu=_as_it_is, default=lax.optimization_barrier)
    return seen, _unpacked(packed, format)


def _as_it_is(x: Any) -> Any:
    """In the place of the barrier without which XLA on a GPU keeps the wide tensor for the backward, and
    casts it again. On a CPU it only makes compiling slower."""
    return x


def quantized_kernel(kernel: Any, recipe: Recipe, state: State, rank: int) -> ScaledArray:
    """A kernel as the forward GEMM takes it: its codes and scale, once for many products.

    Args:
        kernel: float array or `ScaledArray`, shape=(*stack, ...).
        recipe: its `gemm` is "FP8".
        state: its scaling state, whose arrays have the axes of `stack` in front; {} if there is none.
        rank: that of one kernel of the stack.

    Returns:
        A `ScaledArray` in the GEMM's forward format, with one scale for each of the stack:
        `dot_general` gives the same with it as with the kernel.
    """
    format, depth = formats.get(recipe.gemm_formats[0]), kernel.ndim - rank
    if isinstance(kernel, ScaledArray) and kernel.data.dtype == format.dtype:
        return kernel

    def one(kernel: jax.Array, state: State) -> ScaledArray:
        scale = scaling.of_recipe(recipe).scale(state, 1, amax(kernel), format.max)
        return quantize(kernel, format, scale)

    for _ in range(depth):
        one = jax.vmap(one)
    q = one(value(kernel), state)
    blocks = (*q.scale.shape, *(1,) * rank)
    return ScaledArray(q.data, q.scale.reshape(blocks))


def _packed(q: ScaledArray) -> ScaledArray:
    """As it is kept for the backward: bytes, see `to_bytes`."""
    return ScaledArray(to_bytes(q.data), q.scale)


def _unpacked(matrix: Any, format: formats.Format) -> Any:
    """The inverse of `_packed`; what was not packed stays as it is."""
    if not isinstance(matrix, ScaledArray):
        return matrix
    return ScaledArray(lax.bitcast_convert_type(matrix.data, format.dtype), matrix.scale)


def _multiply(static: _Static, lhs: Any, rhs: Any, spec: str, *, precise: bool) -> jax.Array:
    """One GEMM between matrices, in FP8 if the operands are."""
    dimension_numbers = static.layout.contract(spec)
    if isinstance(lhs, ScaledArray):
        multiply = backends.get(static.backend).dot
        return multiply(lhs, rhs, dimension_numbers, out_dtype=static.out_dtype, precise=precise)
    out = lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32)
    return out.astype(static.out_dtype)
