"""Tracking of a parameter through the casts, transposes, reshapes and slices of a jaxpr.

    way = Way.of(("layers", "up"), (3, 64, 128), dtype)
    way = follow(way, eqn)          # None if the equation computes a new value

Casts and transposes are only recorded, because the dot product reads the stored kernel. Reshapes and slices
are applied to the FP8 codes (`moved`), so a kernel reaches its dot product without being dequantized.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.dot import Weight
from fp8jax.quantization import ScaledArray, is_scaled, value
from fp8jax.scaling.merge import FP8_GRAD

# Equations that return their input, perhaps with another sharding or name.
_IDENTITIES = ("copy", "copy_p", "name", "reshard", "sharding_constraint")
_RESHAPES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")
_SLICES = ("dynamic_slice", "slice", "split")


@dataclasses.dataclass(frozen=True)
class Way:
    """A parameter, with the moves applied to it so far.

    Attributes:
        path: names of the parameter in the tree of parameters.
        perm: for each axis of the value, the axis of the stored array.
        shape: shape of the value.
        dtypes: the parameter's dtype and the dtypes of its casts, in order.
        loops: sites and lengths of the scans that sliced it, outermost first.
        is_frozen: whether it passed a `stop_gradient`.
        is_shared: whether it is a part of the parameter, or a loop constant.
    """

    path: tuple[str, ...]
    perm: tuple[int, ...]
    shape: tuple[int, ...]
    dtypes: tuple[Any, ...]
    loops: tuple[tuple[tuple[int, ...], int], ...] = ()
    is_frozen: bool = False
    is_shared: bool = False

    @classmethod
    def of(cls, path: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> "Way":
        """The way of a parameter without moves."""
        return cls(path, tuple(range(len(shape))), tuple(shape), (jnp.dtype(dtype),))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("stored", "grad_slot"), meta_fields=("way", "shard")
)
@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """A stored parameter and its `Way`."""

    stored: Any  # float array or ScaledArray; `way.perm` relates its axes to the value's
    grad_slot: Any  # see `fp8jax.dot.Weight`; None if `stored` gets the gradient
    way: Way
    shard: Any = None  # ZeRO's sharding of the parameter

    @property
    def kernel(self) -> Any:
        """The parameter as the rhs of `fp8jax.dot.dot_general`."""
        if self.way.is_frozen:
            return jax.tree.map(lax.stop_gradient, self.stored) if self.shard is None else self._value()
        return self.stored if self.grad_slot is None else Weight(self.stored, self.grad_slot, self.shard)

    def value(self) -> jax.Array:
        """The value that the function sees; differentiable."""
        x = functools.reduce(lambda x, dtype: x.astype(dtype), self.way.dtypes, self._value())
        return x.transpose(self.way.perm)

    def _value(self) -> jax.Array:
        x = value(self.stored) if self.grad_slot is None else self._weight().dequantize()
        return lax.stop_gradient(x) if self.way.is_frozen else x

    def _weight(self) -> Weight:
        return Weight(self.stored, self.grad_slot, self.shard)


def plain(x: Any) -> Any:
    """The array that the function sees for `x`."""
    return x.value() if isinstance(x, Tracked) else x


def follow(way: Way, eqn: Any, number: int = 0) -> Way | None:
    """The way of output `number` of an equation with first input `way`; None if it is a new value."""
    name, params = eqn.primitive.name, eqn.params
    shape = tuple(eqn.outvars[number].aval.shape)
    if name in _IDENTITIES:
        return way
    if name == "stop_gradient":
        return dataclasses.replace(way, is_frozen=True)
    if name == "convert_element_type":
        is_float = jnp.issubdtype(params["new_dtype"], jnp.floating)
        dtypes = (*way.dtypes, jnp.dtype(params["new_dtype"]))
        return dataclasses.replace(way, dtypes=dtypes) if is_float else None
    if name == "transpose":
        perm = tuple(way.perm[axis] for axis in params["permutation"])
        return dataclasses.replace(way, perm=perm, shape=shape)
    if name in _RESHAPES and _is_reshape(eqn) or name in _SLICES:
        shared = way.is_shared or name in _SLICES or way.perm != tuple(range(len(way.perm)))
        return dataclasses.replace(way, perm=tuple(range(len(shape))), shape=shape, is_shared=shared)
    return None


def _is_reshape(eqn: Any) -> bool:
    if math.prod(eqn.outvars[0].aval.shape) != math.prod(eqn.invars[0].aval.shape):
        return False
    return eqn.params.get("dimensions") is None or eqn.primitive.name == "squeeze"


def moved(tracked: Tracked, eqn: Any, rest: list[Any]) -> list[Tracked] | None:
    """Applies an equation that `follow` follows to its first input, `tracked`; `rest` are the other inputs.

    Returns None if the equation cannot move the scales of a `ScaledArray`, or a shard.
    """
    name = eqn.primitive.name
    followed = [follow(tracked.way, eqn, number) for number in range(len(eqn.outvars))]
    ways = [way for way in followed if way is not None]
    if name in _RESHAPES + _SLICES:
        if tracked.shard is not None:
            return None
        stored, grad_slot = (_transposed(x, tracked.way.perm) for x in (tracked.stored, tracked.grad_slot))
        parts = _moved_stored(stored, eqn, rest)
        if parts is None:
            return None
        # FP8 gradients of several slices would have different scales.
        assert grad_slot is None or grad_slot.dtype != FP8_GRAD or name not in _SLICES
        grad_slots = [None] * len(ways) if grad_slot is None else _bind(eqn, grad_slot, rest)
        return [Tracked(x, s, way) for x, s, way in zip(parts, grad_slots, ways, strict=True)]
    stored = tracked.stored
    is_whole = tracked.way.perm == tuple(range(len(tracked.way.perm))) and tracked.shard is None
    if name in ("reshard", "sharding_constraint") and is_whole:
        constrained = _bind(eqn, stored.data if is_scaled(stored) else stored, rest)[0]
        stored = ScaledArray(constrained, stored.scale) if is_scaled(stored) else constrained
    return [Tracked(stored, tracked.grad_slot, ways[0], tracked.shard)]


def _transposed(x: Any, perm: tuple[int, ...]) -> Any:
    if x is None or perm == tuple(range(len(perm))):
        return x
    if not is_scaled(x):
        return lax.transpose(x, perm)
    return ScaledArray(lax.transpose(x.data, perm), lax.transpose(x.scale, perm) if x.scale.ndim else x.scale)


def _moved_stored(stored: Any, eqn: Any, rest: list[Any]) -> list[Any] | None:
    if not is_scaled(stored):
        return _bind(eqn, stored, rest)
    data, scale = _bind(eqn, stored.data, rest), stored.scale
    if scale.size == 1:
        return [ScaledArray(x, scale.reshape(())) for x in data]
    # A scale for each layer of a stack, along the first axis.
    shape, name = tuple(stored.data.shape), eqn.primitive.name
    if name == "slice":
        begin, end, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
        step = 1 if strides is None else strides[0]
        if math.prod(scale.shape[1:]) == 1:
            return [ScaledArray(data[0], scale[begin[0] : end[0] : step])]
        return None
    leads = all(x.shape[:1] == shape[:1] for x in data) and scale.shape == (
        shape[0],
        *(1,) * (len(shape) - 1),
    )
    if not leads or name == "dynamic_slice":
        return None
    return [ScaledArray(x, scale.reshape(shape[0], *(1,) * (x.ndim - 1))) for x in data]


def _bind(eqn: Any, x: Any, rest: list[Any]) -> list[Any]:
    """Applies the equation to an array with the shape of its first input, of any dtype."""
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(x, *rest, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def sliced(x: Any, site: tuple[int, ...], length: int) -> Any:
    """The way of a stacked parameter in the body of a scan; None if the scan is not along the first stored
    axis."""
    way = x.way if isinstance(x, Tracked) else x
    if not way.perm or way.perm[0] != 0:
        return None
    perm = tuple(axis - 1 for axis in way.perm[1:])
    loops = (*way.loops, (site, length))
    return dataclasses.replace(way, perm=perm, shape=way.shape[1:], loops=loops)
