"""A warning where a gradient is taken of weights, but not of their scaling state, which is then lost."""

import warnings
from typing import Any

import jax

from fp8jax.quantization import ScaledArray
from fp8jax.scaling.base import KEY, State


def checked(*operands: Any) -> tuple[Any, ...]:
    """The values of lhs, rhs, slot, state and further operands, from `custom_vjp`'s symbolic-zeros wrappers.

    Raises:
        TypeError: JAX's own `grad` is taken with respect to a `ScaledArray`.

    Warns:
        A gradient is taken with respect to the weights, but not to the scaling state.
    """

    def is_perturbed(tree: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(tree))

    _, of_rhs, of_grad_slot, of_state = map(is_perturbed, operands[:4])
    values = tuple(jax.tree.map(lambda leaf: leaf.value, operands))
    lhs, rhs, grad_slot, state = values[:4]
    if of_rhs and isinstance(rhs, ScaledArray):
        raise TypeError(
            f"a scaled weight, {rhs.data.dtype}{list(rhs.shape)}, has no gradient of its own: expected "
            "`fp8jax.value_and_grad` (which takes Flax variables and NNX modules); got JAX's or NNX's own."
        )
    if state and (of_rhs or of_grad_slot) and not of_state:
        _warn_of_lost(state)
    return (lhs, rhs, grad_slot, state, *values[4:])


def _warn_of_lost(state: State) -> None:
    lost = "its count of steps does not advance" if KEY in state else "its new amaxes are lost"
    warnings.warn(
        f"a gradient is taken with respect to weights but not to the FP8 scaling state: {lost}. Take it "
        "with `fp8jax.value_and_grad`, of all of the variables.",
        stacklevel=4,
    )


@jax.custom_vjp
def with_state(weights: Any, kernels: Any, state: State) -> Any:
    """The weights of a model that are not operands of FP8 dots, unchanged: biases, adapters, other layers.

    Args:
        weights: a tree of float arrays.
        kernels: the operands of FP8 dots, which warn by themselves.
        state: the scaling state of one of these dots.

    Warns:
        A gradient is taken with respect to the weights, but not to kernels or to the scaling state.
    """
    del kernels, state
    return weights


def _with_state_forward(weights: Any, *others: Any) -> tuple[Any, None]:
    is_of_weights, is_of_others = (
        any(leaf.perturbed for leaf in jax.tree.leaves(tree)) for tree in (weights, others)
    )
    if is_of_weights and not is_of_others:
        _warn_of_lost(others[-1])
    return jax.tree.map(lambda leaf: leaf.value, weights), None


def _with_state_backward(residuals: None, grad: Any) -> tuple[Any, None, None]:
    del residuals
    return grad, None, None


with_state.defvjp(_with_state_forward, _with_state_backward, symbolic_zeros=True)
