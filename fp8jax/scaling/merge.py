"""Extended dtypes for cotangents: scaling states are merged by max, FP8 gradients cannot be added.

JAX adds the cotangents of a layer that is used twice, or is a constant of a scan. The new scaling state is
the cotangent of the old one, and a sum of two amaxes is wrong. An FP8 weight gradient is codes with a scale,
and a sum of codes is meaningless. So both have extended dtypes: addition of `fm32` is max, and `FP8_GRAD` has
no addition.

    state = jax.grad(loss)(state)                            # the next state, if all uses take to_fm32(state)
    state = from_fm32(jax.grad(loss)(to_fm32(state)))        # the same, but -inf for an unused state

The max of scales is the scale of the largest amax. But a use without an amax (only zeros, or values that are
not finite) has the old scale, or a scale from the history. `marked` makes such a scale negative before the
merge, so that any scale with an amax is larger:

    scales of two uses    2**-9, -2**-3    ->    2**-9
                         -2**-3, -2**-3    ->    2**-3
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float8e4m3fn, PyTree, Shaped

from fp8jax.formats import E4M3
from fp8jax.quantization import from_bytes, select, to_bytes


class _Handler(NamedTuple):
    """Makes an array of a result; Flax's handler lacks the method that `jax_debug_nans` calls."""

    make: Callable[[Any], Any]

    def __call__(self, bufs: Any) -> Any:
        return self.make(bufs)

    def pre_wrap(self, check: Any) -> "_Handler":
        """The handler without the check: an unused state is -inf."""
        del check
        return self


class _MaxRules(fp8_ops.Fp8MetaTyRules):
    @staticmethod
    def global_sharded_result_handler(aval: Any, out_sharding: Any, committed: Any) -> _Handler:
        make = fp8_ops.Fp8MetaTyRules.global_sharded_result_handler(aval, out_sharding, committed)
        return _Handler(make)


class _CodesRules(_MaxRules):
    @staticmethod
    def zero(dt: Any) -> Any:
        return lax.convert_element_type(jnp.zeros((), jnp.uint8), dt)


class _MaxDType(fp8_ops.fp8_meta_dtype_wrapper):
    """Equal to Flax's dtype of the same floats, so that a collection may have states of Flax's FP8 layers."""

    def __eq__(self, other: Any) -> bool:
        return other is self or other == fp8_ops.fp8_meta_dtype_wrapper(self.float_dtype)

    def __hash__(self) -> int:
        return hash(fp8_ops.fp8_meta_dtype_wrapper(self.float_dtype))


@dataclasses.dataclass(frozen=True)
class _CodesDType(fp8_ops.fp8_meta_dtype_wrapper):
    _rules: type = _CodesRules


fm32 = _MaxDType(fp8_ops.fm32.float_dtype, _MaxRules)  # as Flax writes it, which the hash depends on
# uint8, because XLA on CPU converts all float8 arrays that a scan stacks to float16 in each iteration.
FP8_GRAD = _CodesDType(jnp.dtype(jnp.uint8))


# What to do in place of a cast of all variables.
OF_WEIGHTS = (
    "Cast the collection 'params' alone, as in `{**variables, 'params': cast(variables['params'])}`: a "
    "scaling state is no weight."
)


def to_fm32(tree: PyTree) -> PyTree:
    """Converts float32 leaves to `fm32`; `fm32` leaves stay.

    The gradient with respect to a float32 leaf is its next value.

    Raises:
        ValueError: a leaf has another dtype, as after a cast of the weights that included it.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floats = [leaf for leaf in leaves if leaf.dtype != fm32]
    if others := [leaf.dtype for leaf in floats if leaf.dtype != jnp.float32]:
        raise ValueError(f"scaling state: expected float32; got {others[0]}. {OF_WEIGHTS}")
    converted = iter(_to_fm32(floats) if floats else ())
    return treedef.unflatten([leaf if leaf.dtype == fm32 else next(converted) for leaf in leaves])


def from_fm32(tree: PyTree) -> PyTree:
    """Converts `fm32` leaves to float32, `unmarked`; other leaves stay."""
    return jax.tree.map(lambda x: unmarked(from_cotangents(x)) if x.dtype == fm32 else x, tree)


def _as_fm32(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.convert_element_type(x, fm32), tree)


_to_fm32 = jax.custom_vjp(_as_fm32)
_to_fm32.defvjp(lambda old: (_as_fm32(old), old), lambda old, new: (settled(from_cotangents(new), old),))


def to_cotangents(state: PyTree) -> PyTree:
    """A dot's next state as cotangents of its state: `marked`, as `fm32`."""
    return _as_fm32(marked(state))


def from_cotangents(tree: PyTree) -> PyTree:
    """Merged cotangents as float32 arrays: `marked`, and -inf for unused states.

    They can be merged further by max with cotangents of the same state; then `settled` gives the next state.
    """
    with jax.debug_infs(False):
        return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), tree)


def is_state(node: Any) -> bool:
    """Whether a node of a tree is the state of a dot with delayed scaling."""
    return isinstance(node, Mapping) and "amax_history" in node


def marked(tree: PyTree) -> PyTree:
    """The next states with negative scales for operands without an amax in this step."""

    def mark(node: Any) -> Any:
        if not is_state(node):
            return node
        is_new = node["amax_history"][..., 0] > 0
        return type(node)({**node, "scale": jnp.where(is_new, node["scale"], -jnp.abs(node["scale"]))})

    return jax.tree.map(mark, tree, is_leaf=is_state)


def settled(merged: PyTree, old: PyTree) -> PyTree:
    """The next states: the merged states, unmarked, and the old states where nothing was merged."""
    return jax.tree.map(lambda new, old: select(new == -jnp.inf, old, lax.abs(new)), merged, old)


def unmarked(merged: PyTree) -> PyTree:
    """The merged states with positive scales; -inf (nothing merged) stays."""
    return settled(merged, merged)


def zero_fp8_grad(like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Zeros of dtype `FP8_GRAD`, with the shape of `like`."""
    return to_fp8_grad(jnp.zeros_like(like, E4M3.dtype))


def to_fp8_grad(data: Float8e4m3fn[Array, "..."]) -> Shaped[Array, "..."]:
    """Converts E4M3 codes to dtype `FP8_GRAD`, which cannot be added."""
    return lax.convert_element_type(to_bytes(data), FP8_GRAD)


def from_fp8_grad(codes: Shaped[Array, "..."]) -> Float8e4m3fn[Array, "..."]:
    """Converts `FP8_GRAD` to E4M3 codes."""
    return from_bytes(lax.convert_element_type(codes, jnp.uint8), E4M3)


def first_state(states: Shaped[Array, "layers ..."]) -> Shaped[Array, "..."]:
    """The first of the stacked states of layers; the next state of `fm32` states is one for all layers."""
    if states.dtype != fm32:
        return lax.index_in_dim(states, 0, keepdims=False)
    return _first_state(states.shape[0], states)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _first_state(layers: int, states: jax.Array) -> jax.Array:
    del layers
    return lax.index_in_dim(states, 0, keepdims=False)


_first_state.defvjp(
    lambda layers, states: (_first_state(layers, states), None),
    lambda layers, _, new: (_as_fm32(jnp.broadcast_to(from_cotangents(new), (layers, *new.shape))),),
)


def broadcast_under_vmap(tree: PyTree, *operands: Array) -> PyTree:
    """`tree` unchanged; under a vmap of the operands only, a copy for each example.

    Under vmap JAX sums the cotangents of an unmapped array over the examples, and the extended dtypes have no
    sum. The cotangents of an `fm32` leaf's copies are merged by max instead. Per-example gradients (a vmap of
    the gradient) are not merged.
    """
    return jax.tree.map(lambda leaf: _broadcast_p.bind(leaf, *operands), tree)


_broadcast_p = jex.Primitive("broadcast_under_vmap")
_broadcast_p.def_impl(lambda leaf, *operands: leaf)
_broadcast_p.def_abstract_eval(lambda leaf, *operands: leaf)
mlir.register_lowering(_broadcast_p, lambda ctx, leaf, *operands: [leaf])
ad.primitive_jvps[_broadcast_p] = lambda primals, tangents: (_broadcast_p.bind(*primals), tangents[0])


def _batch(args: Any, dims: Any) -> Any:
    (leaf, *operands), (dim, *operand_dims) = args, dims
    sizes = [x.shape[d] for x, d in zip(operands, operand_dims, strict=True) if d is not None]
    if dim is not None or not sizes:
        return _broadcast_p.bind(*args), dim
    leaf = _broadcast_p.bind(leaf, *operands)  # for a vmap around this one
    return (_copies(leaf, sizes[0]), 0) if leaf.dtype in (FP8_GRAD, fm32) else (leaf, None)


batching.primitive_batchers[_broadcast_p] = _batch


def state_copies(state: PyTree, count: int) -> PyTree:
    """`count` copies of a state, along a new first axis; their next states are merged by max."""
    return jax.tree.map(lambda leaf: _copies(leaf, count), to_fm32(state))


def states_of_uses(state: PyTree, uses: int) -> list[PyTree]:
    """A state for each of several uses; their next states are merged by max.

    JAX itself merges the cotangents of an `fm32` array with several uses in compiled code only.
    """
    leaves, treedef = jax.tree.flatten(state)
    return [treedef.unflatten(each) for each in zip(*(_uses(leaf, uses) for leaf in leaves), strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _uses(leaf: jax.Array, count: int) -> tuple[jax.Array, ...]:
    return (leaf,) * count


_uses.defvjp(
    lambda leaf, count: (_uses(leaf, count), None),
    lambda count, _, new: (_as_fm32(functools.reduce(jnp.maximum, map(from_cotangents, new))),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(leaf: jax.Array, count: int) -> jax.Array:
    dtype: Any = leaf.dtype
    plain = lax.convert_element_type(leaf, dtype.float_dtype)
    return lax.convert_element_type(jnp.broadcast_to(plain, (count, *leaf.shape)), dtype)


def _merge_copies(count: int, residuals: None, cotangents: jax.Array) -> tuple[jax.Array]:
    assert cotangents.dtype == fm32
    return (_as_fm32(jnp.max(from_cotangents(cotangents), axis=0)),)


_copies.defvjp(lambda leaf, count: (_copies(leaf, count), None), _merge_copies)
