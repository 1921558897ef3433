"""`apply_updates`, the new variables after an optimizer step; and `tree_map`, arithmetic on FP8 gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from fp8jax.gradients.keys import shown
from fp8jax.optim.guard.lost_tags import check_tags
from fp8jax.optim.guard.replace_update import replaced, replaces
from fp8jax.quantization import (
    ScaledGradient,
    is_scaled,
    plain,
    quantize_gradient,
    quantize_like,
    refuse_dicts,
    value,
)
from fp8jax.variables import PARAMS, has_params, with_collections


def apply_updates(variables: Any, updates: Any) -> Any:
    """`optax.apply_updates` for variables with quantized weights.

    Args:
        variables: the variables that `value_and_grad` returned, or parameters alone.
        updates: the optimizer's updates, a tree like the parameters.

    Returns:
        New variables. A plain leaf becomes `leaf + update` in the leaf's dtype. A `ScaledArray` is replaced
        by the new value from `adam` or `adamw` (`optax.apply_updates` does this, too). With a float update,
        its value plus the update is computed in float32 and quantized to its format, with a new power-of-two
        scale for each scale block. Collections other than "params" stay as they are.

    Raises:
        ValueError: the tree or a shape of the updates differs from the parameters'.
        TypeError: an update is still a `ScaledArray`, because an optax transformation cannot update codes and
            scale consistently; or a parameter is a dict of its codes and scale, as a checkpoint has them.
    """
    refuse_dicts(variables)
    if not has_params(variables):
        return _stepped(variables, updates)
    if has_params(updates) and set(updates) - {PARAMS} and set(updates) <= set(variables):
        raise ValueError(
            f"`updates`: expected a tree like variables['params']; got whole variables, "
            f"{', '.join(map(repr, updates))}. The scaling state is no gradient: give `tx.update` the "
            "gradients that `value_and_grad` returned, or the 'params' of JAX's own."
        )
    is_whole = has_params(updates) and not has_params(variables[PARAMS])
    updates = updates[PARAMS] if is_whole else updates
    return with_collections(variables, {PARAMS: _stepped(variables[PARAMS], updates)})


def _stepped(params: Any, updates: Any) -> Any:
    paths, treedef = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    try:
        new = treedef.flatten_up_to(updates)
    except (TypeError, ValueError):
        raise _another_tree(paths, updates) from None
    for (path, leaf), update in zip(paths, new, strict=True):
        if not (update is None or is_scaled(update) or _shape(update) in ((), _shape(leaf))):
            wanted, at = shown(value(leaf)), jax.tree_util.keystr(path)
            raise ValueError(f"`updates`: expected {wanted} at {at}; got {shown(update)}. {_REMEDY}")
    return treedef.unflatten(_step(leaf, update) for (_, leaf), update in zip(paths, new, strict=True))


_REMEDY = "Give the updates, without the state, that `tx.update(grads, state, variables)` returns for these."


def _another_tree(paths: Any, updates: Any) -> ValueError:
    wanted = {jax.tree_util.keystr(path) for path, _ in paths}
    leaves, _ = jax.tree.flatten_with_path(updates, is_leaf=lambda x: x is None or is_scaled(x))
    seen = {jax.tree_util.keystr(path) for path, _ in leaves}
    pairs = (("without", wanted - seen), ("with", seen - wanted))
    lacks = [f"{word} {min(names)}" for word, names in pairs if names]
    return ValueError(
        f"`updates`: expected the tree of the parameters, of {len(wanted)} leaves; got a "
        f"{type(updates).__name__} of {len(seen)}, {' and '.join(lacks) or 'in other containers'}. {_REMEDY}"
    )


def _shape(update: Any) -> Any:
    return getattr(update, "shape", None if not isinstance(update, int | float) else ())


def _unless_zero(leaf: Any, update: Any) -> Any:
    """The leaf, if `optax.set_to_zero` made the update; other updates raise, or under jit give NaN."""
    bits, _ = update.bits, update.is_intact  # which raises if they became floats
    if not isinstance(bits, jax.core.Tracer) and jnp.any(bits != 0):
        return _step(leaf, plain(update))
    # Compiled code cannot raise, and a gradient must not be applied as an update.
    is_zero = jnp.all(bits == 0)
    return jax.tree.map(lambda x: jnp.where(is_zero, x, jnp.full_like(x, jnp.nan)), leaf)


def _step(leaf: Any, update: Any) -> Any:
    if update is None:
        return leaf
    if replaces(update) and is_scaled(leaf):
        return replaced(leaf, update)
    is_gradient: bool = isinstance(update, ScaledGradient)
    if is_gradient and not update.has_come:
        return _unless_zero(leaf, update)
    if is_scaled(update):
        raise TypeError(
            f"`updates`: expected arrays; got a ScaledArray, {update.data.dtype}{list(update.shape)}. "
            "A transformation without support for FP8 gradients or scaled weights returned it: put "
            "`fp8jax.optim.dequantize()` before it, or `fp8jax.optim.with_dequantized(...)` around it."
        )
    if not is_scaled(leaf):
        return (leaf + update).astype(leaf.dtype)
    return quantize_like(value(leaf) + jnp.asarray(update, jnp.float32), leaf)


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` over the values of gradients: `tree_map(jnp.add, a, b)` is the sum of two gradients.

    `jax.tree.map` itself would act on the codes and on the scales of an FP8 gradient apart. With float
    gradients, as the recipe "te" has, both are the same.

    Args:
        f: a function of arrays of one parameter's gradients that returns an array of the same shape.
        tree: gradients from `value_and_grad`.
        rest: further gradients, or trees of floats with the same structure; each FP8 leaf is one leaf.

    Returns:
        A tree like `tree`. Where it has an FP8 gradient, `f` gets float32 values, and its result is rounded
        to nearest E4M3 on new power-of-two scales, with NaN in place of infinity. Each call rounds again: to
        sum many gradients call `accumulate_gradients`, or `f` with all of them at once.

    Raises:
        TypeError: arithmetic has changed codes and scales apart before; in compiled code the result is NaN.
        ValueError: `f` changes the shape of an FP8 gradient.
    """
    for each in (tree, *rest):
        check_tags(each)

    def mapped(first: Any, *others: Any) -> Any:
        new = f(*(value(leaf) for leaf in (first, *others)))
        if not isinstance(first, ScaledGradient):
            return new
        if jnp.shape(new) != first.shape:
            raise ValueError(
                f"`f`: expected a result of the gradient's shape {first.shape}; got {jnp.shape(new)}. For "
                "another shape, `dequantize` the gradients first."
            )
        made = ScaledGradient.of(quantize_gradient(jnp.asarray(new, jnp.float32), first.bits.shape))
        tags = [jnp.all(leaf.is_intact) for leaf in (first, *others) if isinstance(leaf, ScaledGradient)]
        return made.only_if(jnp.all(jnp.stack(tags)))

    return jax.tree.map(mapped, tree, *rest, is_leaf=is_scaled)
