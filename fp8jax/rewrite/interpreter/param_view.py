"""Tracking of a parameter through the casts, transposes, reshapes and slices of a jaxpr.

    view = ParamView.of(("layers", "up"), leaf)
    view = follow(view, eqn)          # None if the equation computes a new value

Casts and transposes are only recorded, because the dot product reads the stored kernel. Reshapes and slices
are applied to the FP8 codes (`move`), so a kernel reaches its dot product without being dequantized.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from fp8jax.dot import GradSlot, Weight
from fp8jax.dot.layout import on_data
from fp8jax.platforms import explicit_mesh
from fp8jax.quantization import ScaledArray, is_scaled

# Equations that return their input, perhaps with another sharding or name.
_IDENTITIES = ("copy", "copy_p", "name", "reshard", "sharding_constraint")
_RESHAPES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")
_SLICES = ("dynamic_slice", "slice", "split")


@dataclasses.dataclass(frozen=True)
class ParamView:
    """A parameter as an equation sees it: after casts, transposes, reshapes and slices.

    Attributes:
        path: names of the parameter in the tree of parameters.
        perm: for each axis of the value, the axis of the stored array.
        dtypes: the parameter's dtype and the dtypes of its casts, in order.
        size: the parameter's number of entries.
        loops: sites and lengths of the scans that sliced it, outermost first.
        axes: the axes of the stored array that these scans sliced.
        is_frozen: whether it passed a `stop_gradient`.
        is_shared: whether it is a part of the parameter, or a loop constant.
        is_reshaped: whether its axes are not all of the stored array's.
    """

    path: tuple[str, ...]
    perm: tuple[int, ...]
    dtypes: tuple[Any, ...]
    size: int
    loops: tuple[tuple[tuple[int, ...], int], ...] = ()
    axes: tuple[int, ...] = ()
    is_frozen: bool = False
    is_shared: bool = False
    is_reshaped: bool = False

    @classmethod
    def of(cls, path: tuple[str, ...], aval: Any) -> "ParamView":
        """The unchanged parameter; `aval` has the shape and dtype that the function sees."""
        return cls(path, tuple(range(len(aval.shape))), (jnp.dtype(aval.dtype),), math.prod(aval.shape))

    @property
    def is_transposed(self) -> bool:
        """Whether the value's axes are in another order than the stored array's."""
        return self.perm != tuple(range(len(self.perm)))

    def in_scan(self, site: tuple[int, ...], length: int) -> "ParamView | None":
        """One layer of a stack, in the body of a scan; None if the scan is along an unknown stored axis."""
        if not self.perm or (self.is_reshaped and self.perm[0] != 0):
            return None
        first, *others = self.perm
        perm = tuple(axis - (axis > first) for axis in others)
        left = [axis for axis in range(len(self.perm) + len(self.axes)) if axis not in self.axes]
        axes, loops = (*self.axes, left[first]), (*self.loops, (site, length))
        return dataclasses.replace(self, perm=perm, axes=axes, loops=loops)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """A stored parameter and its view."""

    weight: Weight  # `view.perm` relates its axes to the value's
    view: ParamView = dataclasses.field(metadata={"static": True})

    @property
    def kernel(self) -> Weight:
        """The parameter as the rhs of `fp8jax.dot.dot_general`."""
        if not self.view.is_frozen:
            return self.weight
        is_whole = self.weight.shard is None
        return Weight(jax.tree.map(lax.stop_gradient, self.weight.value) if is_whole else self._dequantized())

    def value(self) -> jax.Array:
        """The value that the function sees; differentiable."""
        x = functools.reduce(lambda x, dtype: x.astype(dtype), self.view.dtypes, self._dequantized())
        return x.transpose(self.view.perm)

    def _dequantized(self) -> jax.Array:
        x = self.weight.dequantize()
        return lax.stop_gradient(x) if self.view.is_frozen else x


def untracked(x: Any) -> Any:
    """The array that the function sees for `x`."""
    return x.value() if isinstance(x, Tracked) else x


def follow(view: ParamView, eqn: Any) -> ParamView | None:
    """The view of the outputs of an equation with first input `view`; None if they are new values."""
    name, params = eqn.primitive.name, eqn.params
    if name in _IDENTITIES:
        return view
    if name == "stop_gradient":
        return dataclasses.replace(view, is_frozen=True)
    if name == "convert_element_type":
        is_float = jnp.issubdtype(params["new_dtype"], jnp.floating)
        dtypes = (*view.dtypes, jnp.dtype(params["new_dtype"]))
        return dataclasses.replace(view, dtypes=dtypes) if is_float else None
    if name == "transpose":
        perm = tuple(view.perm[axis] for axis in params["permutation"])
        return dataclasses.replace(view, perm=perm)
    if name in _RESHAPES and _is_reshape(eqn) or name in _SLICES:
        is_shared = view.is_shared or name in _SLICES or view.is_transposed
        perm = tuple(range(len(eqn.outvars[0].aval.shape)))
        return dataclasses.replace(view, perm=perm, is_shared=is_shared, is_reshaped=True)
    return None


def _is_reshape(eqn: Any) -> bool:
    """Whether the output has the input's entries in the same order."""
    if math.prod(eqn.outvars[0].aval.shape) != math.prod(eqn.invars[0].aval.shape):
        return False
    return eqn.params.get("dimensions") is None or eqn.primitive.name == "squeeze"


def move(tracked: Tracked, eqn: jex.JaxprEqn, rest: list[Any]) -> list[Tracked] | None:
    """The outputs of an equation with first input `tracked` and the other inputs `rest`.

    Returns None if they are new values, or if the equation cannot move the scales of a `ScaledArray`, or a
    shard.
    """
    name, view, weight, new = eqn.primitive.name, tracked.view, tracked.weight, follow(tracked.view, eqn)
    if new is None:
        return None
    rest = [untracked(x) for x in rest]
    if name in _RESHAPES + _SLICES:
        if weight.shard is not None:
            return None
        stored, grad_slot = (transpose(x, view.perm) for x in (weight.value, weight.grad_slot))
        parts = _move_stored(stored, eqn, rest)
        if parts is None:
            return None
        # FP8 gradients of several slices would have different scales.
        assert not isinstance(grad_slot, GradSlot) or name not in _SLICES
        grad_slots: Any = [None] * len(parts) if grad_slot is None else _move_stored(grad_slot, eqn, rest)
        assert grad_slots is not None
        return [Tracked(Weight(*pair), new) for pair in zip(parts, grad_slots, strict=True)]
    if name in ("reshard", "sharding_constraint") and weight.shard is None:
        inverse = tuple(map(view.perm.index, range(len(view.perm))))
        seen = on_data(lambda x: bind(eqn, x, *rest)[0], transpose(weight.value, view.perm))
        weight = dataclasses.replace(weight, value=transpose(seen, inverse))
    return [Tracked(weight, new)]


def transpose(x: Any, perm: tuple[int, ...]) -> Any:
    """A stored kernel, or its slot, with its axes in another order."""
    if x is None or perm == tuple(range(len(perm))):
        return x
    if not isinstance(x, ScaledArray | GradSlot):
        return lax.transpose(x, perm)
    return type(x)(lax.transpose(x.data, perm), transpose(x.scale, perm) if x.scale.ndim else x.scale)


def _move_stored(stored: Any, eqn: jex.JaxprEqn, rest: list[Any]) -> list[Any] | None:
    """The outputs of a reshape or slice of a stored parameter, or its slot; None if its scales cannot be
    moved."""
    if not isinstance(stored, ScaledArray | GradSlot):
        return bind(eqn, stored, *rest)
    with_scale, data, scale = type(stored), bind(eqn, stored.data, *rest), stored.scale
    if scale.size == 1:
        return [with_scale(x, scale.reshape(())) for x in data]
    # A scale for each layer of a stack, along the first axis.
    layers, name = stored.data.shape[0], eqn.primitive.name
    if math.prod(scale.shape[1:]) != 1:
        return None
    if name == "slice":
        begin, end, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
        step = 1 if strides is None else strides[0]
        return [with_scale(data[0], scale[begin[0] : end[0] : step])]
    if name == "dynamic_slice" or scale.shape[0] != layers or any(x.shape[:1] != (layers,) for x in data):
        return None
    return [with_scale(x, scale.reshape(layers, *(1,) * (x.ndim - 1))) for x in data]


def bind(eqn: jex.JaxprEqn, *ins: Any) -> list[Any]:
    """Applies the equation to arrays with the shapes of its inputs, of any dtype."""
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


# Parameters before they are tracked ##############################################################


def is_array(x: Any) -> bool:
    """Whether an argument is an input of the program rather than a constant."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def can_be_kernel(x: Any) -> bool:
    """Whether a parameter leaf can be a kernel and is not yet a `Tracked`."""
    if isinstance(x, Tracked):
        return False
    return is_scaled(x) or (is_array(x) and len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.floating))


def aval_of(leaf: Any) -> Any:
    """The leaf with the shape and dtype that the function sees."""
    if not is_scaled(leaf):
        return leaf
    # On a mesh with explicit axes the sharding is part of the type.
    is_typed = isinstance(leaf.data, jax.Array) and explicit_mesh(leaf.data)
    sharding = jax.typeof(leaf.data).sharding if is_typed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.own_dtype, sharding=sharding)


def names_of(paths: Sequence[Any]) -> list[tuple[str, ...]]:
    """The paths of a tree's leaves as names, without the "value" of a box around a single leaf, such as an
    `nnx.Variable`. A field `value` beside others has its name."""
    names = [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path in paths]
    leaves = collections.Counter(each[:end] for each in names for end in range(1, len(each)))
    boxed = [getattr(path[-1], "name", "") == "value" if path else False for path in paths]
    return [
        each[:-1] if is_value and leaves[each[:-1]] == 1 else each
        for each, is_value in zip(names, boxed, strict=True)
    ]
