"""The parameters that Muon updates as matrices, and its hyperparameters."""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
import optax

from fp8jax.optim.step import MuonScalars, nesterov_shares
from fp8jax.optim.transforms import plain_mask
from fp8jax.quantization import is_scaled
from fp8jax.variables import named_leaves

Axes = optax.contrib.MuonDimensionNumbers
_VECTORS = ("bias", "scale")  # names of vectors in Flax, stacked or not


@dataclasses.dataclass(frozen=True)
class Muon:
    """Hyperparameters of `muon` beside those of its Adam."""

    learning_rate: Any
    beta: Any
    weight_decay: Any
    dimension_numbers: Any
    consistent_rms: Any

    def scalars(self, steps: jax.Array, count: jax.Array) -> MuonScalars:
        """The scalars of step number `count`, after `steps` steps."""
        rate: Any = self.learning_rate(steps) if callable(self.learning_rate) else self.learning_rate
        nesterov = nesterov_shares(self.beta, count)
        return MuonScalars(self.beta, 1 - self.beta, nesterov, -rate, self.weight_decay)


def matrices_of(muon: Muon | None, treedef: Any, params: Any) -> tuple[Axes | None, ...]:
    """The dimension numbers of each parameter that is a matrix, or a stack of them; None for the others.

    Args:
        muon: the hyperparameters; None for Adam of all parameters.
        treedef: of the parameters.
        params: the parameters, arrays and `ScaledArray`s.

    Raises:
        ValueError: the dimension numbers are not a tree like the parameters, or do not fit a parameter.
    """
    if muon is None:
        return (None,) * treedef.num_leaves
    if muon.dimension_numbers is None:
        return tuple(_default(path, leaf) for path, leaf in named_leaves(params, is_scaled))
    leaves = treedef.flatten_up_to(params)
    given = plain_mask(muon.dimension_numbers)
    given = given(params) if callable(given) else given
    try:
        every = spread(given, treedef, params, is_leaf=lambda node: node is None or isinstance(node, Axes))
    except (TypeError, ValueError):
        raise ValueError(
            "`weight_dimension_numbers`: expected a tree like the parameters of "
            "`optax.contrib.MuonDimensionNumbers`, and None for parameters that Adam updates, or a function "
            f"from the parameters to one; got {given!r}."
        ) from None
    return tuple(
        None if axes is None else _checked(axes, leaf) for axes, leaf in zip(every, leaves, strict=True)
    )


def spread(tree: Any, treedef: Any, params: Any, is_leaf: Any = None) -> list[Any]:
    """The leaf of `tree`, a tree like the parameters or a part of it from the root, for each parameter."""
    each = jax.tree.map(
        lambda leaf, below: jax.tree.map(lambda _: leaf, below, is_leaf=is_scaled),
        tree,
        params,
        is_leaf=is_leaf,
    )
    return treedef.flatten_up_to(each)


def _default(path: str, leaf: Any) -> Axes | None:
    """Both axes of an array of two dimensions that is no stack of biases or scales. The last two of a
    `ScaledArray` with a scale for each index of the others, as a stack of scanned layers or of experts has
    it."""
    scales = leaf.scale.shape if is_scaled(leaf) else ()
    is_stack = leaf.ndim > 2 and scales == (*leaf.shape[:-2], 1, 1)
    is_matrix = leaf.ndim == 2 and _name(path) not in _VECTORS
    return Axes((leaf.ndim - 2,), (leaf.ndim - 1,)) if is_matrix or is_stack else None


def _name(path: str) -> str:
    """The last name of a path that is not one of a box around the array."""
    return next((name for name in reversed(path.split("/")) if name != "value"), "")


def warn_of_stacks(muon: Muon | None, params: Any) -> None:
    """Warns of what looks like stacks of kernels, and is updated by Adam for want of dimension numbers."""
    if muon is None or muon.dimension_numbers is not None:
        return
    stacks = [
        path
        for path, leaf in named_leaves(params, is_scaled)
        if leaf.ndim > 2 and _name(path) == "kernel" and _default(path, leaf) is None
    ]
    if stacks:
        warnings.warn(
            f"muon updates {', '.join(stacks[:3])}{' and others' * (len(stacks) > 3)} by Adam: plain arrays "
            "of more than two dimensions are no matrices by default. Give `weight_dimension_numbers`, e.g. "
            "MuonDimensionNumbers(1, 2) for stacked layers, and None for what Adam shall update.",
            stacklevel=3,
        )


def _checked(axes: Any, leaf: Any) -> Axes:
    """The dimension numbers as tuples of axes from 0 on."""
    try:
        pair = [np.atleast_1d(each) for each in axes]
        inputs, outputs = (tuple(int(axis) % leaf.ndim for axis in each) for each in pair)
        is_inside = all(-leaf.ndim <= axis < leaf.ndim for each in pair for axis in each)
        if is_inside and len({*inputs, *outputs}) == len(inputs) + len(outputs):
            return Axes(inputs, outputs)
    except (TypeError, ValueError, ZeroDivisionError):
        pass
    raise ValueError(
        "`weight_dimension_numbers`: expected axes of a parameter, none of them twice, as in "
        f"MuonDimensionNumbers(0, 1); got {axes} for shape {leaf.shape}."
    )
