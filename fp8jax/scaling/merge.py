"""What happens where cotangents meet: amaxes are merged by max, FP8 codes are never added.

JAX adds the cotangents of a layer that is used twice, or broadcast in a scan. The new scaling
state leaves a step as the cotangent of the old one, and the sum of two amaxes is wrong; an
FP8 weight gradient is codes on a scale of their own, and the sum of two codes is nonsense.
Both travel as arrays of extended dtypes, in which addition means something else, or is not there:

    state = jax.grad(loss)(state)                            # the next one, if all uses take to_max(state)
    state = from_max(jax.grad(loss)(to_max(state)))          # the same, but -inf where unused

The maximum of scales is the scale of the largest amax, but for a use without an amax (zeros, or
numbers that are not finite): its scale is the old one, or that of a window of the past. While states
meet it is negative, so that any other is larger (`marked`):

    scales of two uses    2**-9, -2**-3    ->    2**-9
                         -2**-3, -2**-3    ->    2**-3

The dtypes are Flax's (`fm32` and its kin, made for the first purpose). This is the only
module besides `models/` that imports flax.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from flax.linen.fp8_ops import Fp8MetaTyRules, fm32, fp8_meta_dtype_wrapper
from jax import lax
from jax.interpreters import ad, batching, mlir

from fp8jax.formats import E4M3
from fp8jax.scaled import select, to_bytes


class _CodesRules(Fp8MetaTyRules):
    @staticmethod
    def zero(dt: Any) -> Any:
        return lax.convert_element_type(jnp.zeros((), jnp.uint8), dt)


@dataclasses.dataclass(frozen=True)
class _CodesDType(fp8_meta_dtype_wrapper):
    _rules: type = _CodesRules


# Bytes: XLA on CPU would stack a scan's float8 arrays by way of float16, all of them at each step.
FP8_GRAD = _CodesDType(jnp.dtype(jnp.uint8))


def to_fm32(tree: Any) -> Any:
    """float32 leaves become `fm32`; leaves that are already stay.

    The gradient with respect to the float32 leaves is their next value.
    """
    leaves, treedef = jax.tree.flatten(tree)
    others = [i for i, leaf in enumerate(leaves) if leaf.dtype != fm32]
    for i, leaf in zip(others, _to_fm32([leaves[i] for i in others]) if others else (), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def from_fm32(tree: Any) -> Any:
    """`fm32` leaves become float32 again, without marks; other leaves stay."""
    return jax.tree.map(lambda x: _unmarked(_to_float32(x)) if x.dtype == fm32 else x, tree)


def _as_fm32(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.convert_element_type(x, fm32), tree)


def _to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), tree)


_to_fm32 = jax.custom_vjp(_as_fm32)
_to_fm32.defvjp(lambda old: (_as_fm32(old), old), lambda old, new: (settled(from_cotangents(new), old),))


def to_cotangents(state: Any) -> Any:
    """The next state of a dot as the cotangents of its state."""
    return _as_fm32(marked(state))


def from_cotangents(tree: Any) -> Any:
    """Merged cotangents as float32 arrays: `marked`, and -inf where unused. They can be merged by max with
    others of the same state; at last they are `settled`."""
    return _to_float32(tree)


def marked(tree: Any) -> Any:
    """Next states, the scales of which are negative where no amax of this step is behind them."""

    def is_state(node: Any) -> bool:
        return isinstance(node, Mapping) and "amax_history" in node

    def mark(node: Any) -> Any:
        if not is_state(node):
            return node
        is_new = node["amax_history"][..., 0] > 0
        return type(node)({**node, "scale": jnp.where(is_new, node["scale"], -jnp.abs(node["scale"]))})

    return jax.tree.map(mark, tree, is_leaf=is_state)


def settled(merged: Any, old: Any) -> Any:
    """The next states: merged ones without marks, and the old ones where nothing was merged."""
    return jax.tree.map(lambda new, old: select(new == -jnp.inf, old, lax.abs(new)), merged, old)


def unmarked(merged: Any) -> Any:
    """Merged states without marks; -inf, where nothing was merged, stays."""
    return jax.tree.map(_unmarked, merged)


def _unmarked(x: jax.Array) -> jax.Array:
    return select(x == -jnp.inf, x, lax.abs(x))


def zero_fp8_grad(like: jax.Array) -> jax.Array:
    """Zero E4M3 codes that cannot be added, of an array's shape."""
    return to_fp8_grad(jnp.zeros_like(like, E4M3.dtype))


def to_fp8_grad(data: jax.Array) -> jax.Array:
    """E4M3 codes as an array that cannot be added."""
    return lax.convert_element_type(to_bytes(data), FP8_GRAD)


def from_fp8_grad(codes: jax.Array) -> jax.Array:
    """The E4M3 codes again."""
    return lax.bitcast_convert_type(lax.convert_element_type(codes, jnp.uint8), E4M3.dtype)


def broadcast_under_vmap(tree: Any, *operands: Any) -> Any:
    """`tree` as it is; where a vmap maps the operands alone, one copy for each example.

    JAX would sum the cotangents of an array that the examples share, by an addition that the
    dtypes here do not have: those of the copies of an `fm32` leaf merge by max. Per-example gradients, a vmap
    of the gradient, are not summed.
    """
    return jax.tree.map(lambda leaf: _along_p.bind(leaf, *operands), tree)


_along_p = jex.Primitive("broadcast_under_vmap")
_along_p.def_impl(lambda leaf, *operands: leaf)
_along_p.def_abstract_eval(lambda leaf, *operands: leaf)
mlir.register_lowering(_along_p, lambda ctx, leaf, *operands: [leaf])
ad.primitive_jvps[_along_p] = lambda primals, tangents: (_along_p.bind(*primals), tangents[0])


def _batch(args: Any, dims: Any) -> Any:
    (leaf, *operands), (dim, *theirs) = args, dims
    mapped = [(x, d) for x, d in zip(operands, theirs, strict=True) if d is not None]
    if dim is not None or not mapped:
        return _along_p.bind(*args), dim
    if leaf.dtype not in (FP8_GRAD, fm32):
        return leaf, None
    x, d = mapped[0]
    return _copies(leaf, x.shape[d]), 0


batching.primitive_batchers[_along_p] = _batch


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(leaf: jax.Array, count: int) -> jax.Array:
    dtype: Any = leaf.dtype
    plain = lax.convert_element_type(leaf, dtype.float_dtype)
    return lax.convert_element_type(jnp.broadcast_to(plain, (count, *leaf.shape)), dtype)


def _merge_copies(count: int, kept: None, cotangents: jax.Array) -> tuple[jax.Array]:
    assert cotangents.dtype == fm32
    return (_as_fm32(jnp.max(_to_float32(cotangents), axis=0)),)


_copies.defvjp(lambda leaf, count: (_copies(leaf, count), None), _merge_copies)
