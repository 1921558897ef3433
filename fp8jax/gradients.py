"""Variables in, variables out: the loss's gradient, and a step along it.

    loss, grads = fp8jax.value_and_grad(loss_fn)(variables, batch)
    updates, opt_state = tx.update(grads, opt_state, variables)
    variables = fp8jax.apply_updates(variables, updates)

`variables` are Flax's: `{"params": ..., "_overwrite_with_gradient": ...}`. The gradient has
the same structure: under "params" the gradients, in the format that the recipe's
`weight_grad` column names, under "_overwrite_with_gradient" the new scaling state, which
replaces the old one, as a new "loss_scale" does. A tree without a "params" collection is
taken as the parameters.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp

from fp8jax import formats, loss_scale
from fp8jax.dot import Weight
from fp8jax.optim.overwrite import overwrites
from fp8jax.scaled import ScaledArray, format_of, is_scaled, quantize, quantize_gradient, select, value
from fp8jax.scaling.merge import (
    CODES,
    NeedsWideGradient,
    adds_codes,
    from_codes,
    from_max,
    no_codes,
    to_max,
)
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params


def value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.value_and_grad` for variables that hold scaled weights and scaling state.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` gives a scalar, or with `has_aux` a
            scalar and anything else.
        has_aux: as in `jax.value_and_grad`.

    Returns:
        A function of the same arguments that gives `(loss, grads)`, or
        `((loss, aux), grads)`. `grads["params"]` holds an array for an array (in its dtype),
        and for a `ScaledArray` weight a float32 array, or a `ScaledArray` in E4M3 with a
        power-of-two scale where the recipe's weight gradients are FP8. Where a layer is
        used more than once, its amaxes are merged by max; the state of a layer that the
        loss did not use stays as it was. Other collections take no part.

    References:
        FP8-LM, arXiv 2310.18313, section 2.1 (FP8 gradients); MS-AMP `ScalingParameter`.
    """

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        if has_params(variables) and LOSS_SCALE in variables:
            return _with_loss_scale(loss_fn, has_aux, variables, args, kwargs)

        def run(variables: Any) -> Any:
            try:
                return _value_and_grad(loss_fn, variables, args, kwargs, has_aux, narrow=True)
            except NeedsWideGradient:
                # A kernel's gradient is a sum: let all leave as float32, to be narrowed after it.
                return _value_and_grad(loss_fn, variables, args, kwargs, has_aux, narrow=False)

        # JAX adds arrays of an extended dtype only in compiled code.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(variables))
        return run(variables) if is_traced else jax.jit(run)(variables)

    return wrapped


def accumulate_gradients(
    loss_fn: Callable[..., Any], microbatches: int, *, has_aux: bool = False, format: str = "FP16"
) -> Callable[..., Any]:
    """`value_and_grad` of a batch taken in parts, one after the other: the memory of one part.

    Args:
        loss_fn: as in `value_and_grad`; the mean over the batch of a loss per example.
        microbatches: number of parts.
        has_aux: as in `value_and_grad`.
        format: what the gradients of scaled kernels are summed in: "FP16" on power-of-two
            scales (each sum is rounded to 11 bits), "FP32", or "E4M3" as in MS-AMP. Others are
            summed in float32.

    Returns:
        A function of the same arguments, whose arrays after the variables are split along
        their first axis; keyword arguments are not. The loss is the mean over the parts, the
        auxiliary outputs are stacked, the gradients are the mean, in `value_and_grad`'s
        formats. All parts are scaled by the state that came in; their amaxes merge by max.

    Raises:
        ValueError: an array's first axis does not divide by `microbatches`, or no such format.
    """
    if format not in ("FP16", "FP32", "E4M3"):
        raise ValueError(f"`format`: expected FP16, FP32 or E4M3; got {format!r}.")
    grad_fn = value_and_grad(loss_fn, has_aux=has_aux)

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        def one(part: Any) -> Any:
            return grad_fn(variables, *part, **kwargs)

        def add(sums: Any, part: Any) -> tuple[Any, Any]:
            out, grads = one(part)
            return _add(sums, grads, microbatches), out

        parts = jax.tree.map(lambda x: _split(x, microbatches), args)
        _, shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
        sums, out = jax.lax.scan(add, _no_sums(shapes, format), parts)
        loss, aux = out if has_aux else (out, None)
        loss = jnp.mean(loss)
        grads = _finished(sums, shapes, variables)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def _split(x: Any, parts: int) -> Any:
    if not jnp.ndim(x) or x.shape[0] % parts:
        raise ValueError(
            f"a batch array's first axis must divide by `microbatches`={parts}; got shape {jnp.shape(x)}."
        )
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _no_sums(grads: Any, format: str) -> Any:
    """What gradients of these shapes are added to, and states are merged with."""
    sums = formats.get(format)

    def zeros(leaf: Any) -> Any:
        if is_scaled(leaf) and sums != formats.FP32:
            return ScaledArray(jnp.zeros_like(leaf.data, sums.dtype), jnp.ones_like(leaf.scale))
        return jnp.zeros_like(leaf.data if is_scaled(leaf) else leaf, jnp.float32)

    def unseen(least: float) -> Any:
        return lambda leaf: jnp.full(leaf.shape, least, leaf.dtype)

    if not has_params(grads):
        return jax.tree.map(zeros, grads, is_leaf=is_scaled)
    start = {PARAMS: jax.tree.map(zeros, grads[PARAMS], is_leaf=is_scaled)}
    if SCALING in grads:
        start[SCALING] = jax.tree.map(unseen(-jnp.inf), grads[SCALING])
    if LOSS_SCALE in grads:
        start[LOSS_SCALE] = jax.tree.map(unseen(2**30), grads[LOSS_SCALE])
    return start


def _add(sums: Any, grads: Any, parts: int) -> Any:
    """The sums with one part's share of the mean gradient added."""

    def add(total: Any, grad: Any) -> Any:
        new = value(total) + value(grad).astype(jnp.float32) / parts
        if not is_scaled(total):
            return new
        return quantize(new, format_of(total), power_of_two=True, blocks=total.scale.shape)

    if not has_params(grads):
        return jax.tree.map(add, sums, grads, is_leaf=is_scaled)
    # One part with a bad gradient lowers the loss scale.
    merge = {SCALING: jnp.maximum, LOSS_SCALE: jnp.minimum}
    others = {name: jax.tree.map(merge[name], sums[name], grads[name]) for name in grads if name != PARAMS}
    return {PARAMS: jax.tree.map(add, sums[PARAMS], grads[PARAMS], is_leaf=is_scaled), **others}


def _finished(sums: Any, shapes: Any, variables: Any) -> Any:
    """The sums in the formats of gradients of these shapes."""

    def narrow(total: Any, like: Any) -> Any:
        return quantize_gradient(total, like.scale.shape) if is_scaled(like) else total.astype(like.dtype)

    if not has_params(sums):
        return jax.tree.map(narrow, sums, shapes, is_leaf=is_scaled)
    grads = {**sums, PARAMS: jax.tree.map(narrow, sums[PARAMS], shapes[PARAMS], is_leaf=is_scaled)}
    if SCALING in sums:
        grads[PARAMS], grads[SCALING] = _narrow(grads[PARAMS], variables[PARAMS], sums[SCALING])
    return grads


def _value_and_grad(
    loss_fn: Callable[..., Any], variables: Any, args: Any, kwargs: Any, has_aux: bool, narrow: bool
) -> Any:
    is_flax = has_params(variables)
    params = variables[PARAMS] if is_flax else variables
    state = variables.get(SCALING, {}) if is_flax else {}
    is_marked = _is_marked(params, state)

    def slot(leaf: Any, marked: bool) -> Any:
        like = leaf.data if is_scaled(leaf) else leaf  # sharded as it is
        if marked and narrow:
            return no_codes(like)
        return jnp.zeros_like(like, jnp.float32) if marked or is_scaled(leaf) else leaf

    def opened(leaf: Any, slot: Any, marked: bool) -> Any:
        return Weight(leaf, slot) if marked or is_scaled(leaf) else slot

    def loss(slots: Any, state: Any) -> Any:
        inside = jax.tree.map(opened, params, slots, is_marked, is_leaf=is_scaled)
        if is_flax:
            inside = {**variables, PARAMS: inside}
            if SCALING in variables:
                inside[SCALING] = state
        return loss_fn(inside, *args, **kwargs)

    slots = jax.tree.map(slot, params, is_marked, is_leaf=is_scaled)
    # The slots' and the state's dtypes, added in their own way, are no floats to `jax.grad`.
    grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux, allow_int=True)
    if narrow and any(jax.tree.leaves(is_marked)):
        grad_fn = _unless_codes_meet(grad_fn, slots, to_max(state))
    out, (grads, new_state) = grad_fn(slots, to_max(state))
    new_state = jax.tree.map(_unless_unused, from_max(new_state), state)
    grads, new_state = _narrow(grads, params, new_state)
    if not is_flax:
        return out, grads
    return out, {PARAMS: grads, **({SCALING: new_state} if SCALING in variables else {})}


def _with_loss_scale(
    loss_fn: Callable[..., Any], has_aux: bool, variables: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """`value_and_grad` of the scaled loss, made that of the loss."""
    state = variables[LOSS_SCALE]

    def scaled(variables: Any, *args: Any, **kwargs: Any) -> Any:
        out = loss_fn(variables, *args, **kwargs)
        return (out[0] if has_aux else out) * state["scale"], out

    variables = {name: tree for name, tree in variables.items() if name != LOSS_SCALE}
    (_, out), grads = value_and_grad(scaled, has_aux=True)(variables, *args, **kwargs)
    grads[PARAMS], new_state = loss_scale.unscale(grads[PARAMS], state)
    return out, {**grads, LOSS_SCALE: new_state}


def _unless_codes_meet(grad_fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`grad_fn` traced, so that it is known whether it adds FP8 codes; raises if it does."""
    jaxpr, out = jax.make_jaxpr(grad_fn, return_shape=True)(*args)
    if adds_codes(jaxpr.jaxpr):
        raise NeedsWideGradient
    run, treedef = jax.extend.core.jaxpr_as_fun(jaxpr), jax.tree.structure(out)
    return lambda *args: jax.tree.unflatten(treedef, run(*jax.tree.leaves(args)))


def _unless_unused(new: jax.Array, old: jax.Array) -> jax.Array:
    return select(new == -jnp.inf, old, new)


def _is_marked(params: Any, state: Any) -> Any:
    """For each parameter, whether its gradient is FP8: its state has a scale for it."""
    if not isinstance(params, Mapping):
        return jax.tree.map(lambda leaf: "wgrad_scale" in state, params, is_leaf=is_scaled)
    return {name: _is_marked(below, state.get(name, {})) for name, below in params.items()}


def _narrow(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """The marked gradients as `ScaledArray`s, and the state with their scales."""
    if not isinstance(grads, Mapping):
        return grads, state
    grads, state = dict(grads), dict(state)
    for name, kept in state.items():
        if name not in grads:
            continue  # of a product that is no layer's
        if isinstance(grads[name], Mapping):
            grads[name], state[name] = _narrow(grads[name], params[name], kept)
        elif "wgrad_scale" in kept:
            # A kernel may stand in a box of axis names.
            [grad], box = jax.tree.flatten(grads[name], is_leaf=is_scaled)
            [param] = jax.tree.leaves(params[name], is_leaf=is_scaled)
            grad, scale = _narrow_leaf(grad, param, kept["wgrad_scale"])
            grads[name] = jax.tree.unflatten(box, [grad])
            state[name] = {**kept, "wgrad_scale": scale}
    return grads, state


def _narrow_leaf(grad: Any, param: Any, scale: jax.Array) -> tuple[ScaledArray, jax.Array]:
    """One gradient, as codes on `scale`, wide or done, as a `ScaledArray`; and its scale in scale's shape."""
    blocks = scale.shape + (1,) * (param.ndim - scale.ndim) if scale.ndim else ()
    if is_scaled(param):
        blocks = param.scale.shape
    if is_scaled(grad):
        return grad, grad.scale.reshape(scale.shape)
    if grad.dtype == CODES:
        return ScaledArray(from_codes(grad), scale.reshape(blocks)), scale
    q = quantize_gradient(grad, blocks)
    return q, q.scale.reshape(scale.shape)


def apply_updates(variables: Any, updates: Any) -> Any:
    """`variables` after a step: `optax.apply_updates` that knows scaled weights.

    Args:
        variables: Flax variables, or parameters alone.
        updates: what the optimizer made of `value_and_grad`'s gradients: the same structure,
            or that of the parameters alone if `variables` are the parameters alone.

    Returns:
        New variables. A plain leaf becomes `leaf + update` in its own dtype. A `ScaledArray`
        becomes the new value that `adam` or `adamw` gave it (`optax.apply_updates` does this
        too); with a float update its value plus the update, computed in float32, and quantized
        to its format on a fresh power-of-two scale per block of its old scale. The scaling
        state is replaced by that in `updates`. Collections that `updates` does not have stay.

    Raises:
        ValueError: `updates` has a collection that `variables` lacks.
        TypeError: an update is still a `ScaledArray`: optax's own links act on its codes and
            on its scale apart, which means nothing.
    """
    if not has_params(variables):
        return jax.tree.map(_step, variables, updates, is_leaf=is_scaled)
    if not has_params(updates) or not set(updates) <= set(variables):
        got = sorted(updates) if isinstance(updates, Mapping) else type(updates).__name__
        raise ValueError(
            f"`updates`: expected the collections of `variables` ({', '.join(sorted(variables))}), "
            f"'params' among them; got {got}. Give `tx.update` the gradients and variables as "
            "`value_and_grad` returned and took them."
        )
    params = jax.tree.map(_step, variables[PARAMS], updates[PARAMS], is_leaf=is_scaled)
    return {**variables, **updates, PARAMS: params}


def _step(leaf: Any, update: Any) -> Any:
    if update is None:
        return leaf
    if overwrites(update) and is_scaled(leaf):
        return jax.tree.map(operator.add, leaf, update)
    if is_scaled(update):
        raise TypeError(
            f"`updates`: expected arrays; got a ScaledArray, {update.data.dtype}{list(update.shape)}. "
            "Links that know no scaled gradients ran on one: put `fp8jax.optim.dequantize()` before them."
        )
    if not is_scaled(leaf):
        return (leaf + update).astype(leaf.dtype)
    new = value(leaf) + update.astype(jnp.float32)
    format = format_of(leaf)
    return quantize(new, format, power_of_two=True, blocks=leaf.scale.shape)
