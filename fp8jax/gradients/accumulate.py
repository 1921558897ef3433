"""The gradient of a batch that is taken in parts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.comm.reduce import on_shared_scale
from fp8jax.gradients.devices import GradSharding, ShardContext, over_devices
from fp8jax.gradients.keys import check_named, fold_in, names_of, refuse_whole
from fp8jax.gradients.loss import check_arguments, for_optimizers, narrowed, on_one_device
from fp8jax.scaled import ScaledArray, format_of, is_scaled, quantize, quantize_gradient, value
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    microbatches: int,
    *,
    has_aux: bool = False,
    format: str = "FP16",
    zero: Zero | None = None,
    keys: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` of a batch taken in parts, one after the other: the memory of one part.

    Args:
        loss_fn: as in `value_and_grad`; the mean over the batch of a loss per example.
        microbatches: number of parts.
        has_aux: as in `value_and_grad`.
        format: what the gradients of scaled kernels are summed in: "FP16" on power-of-two
            scales (each sum is rounded to 11 bits), "FP32", or "E4M3" as in MS-AMP. Others are
            summed in float32.
        zero: as in `value_and_grad`: each device takes its part of the batch in parts.
        keys: the keyword arguments that hold random keys, e.g. for dropout, by name: a key, or a tree of
            keys, as Linen's `rngs={"dropout": key}`. Part i gets `jax.random.fold_in(key, i)`, with `zero`
            part i of device d `jax.random.fold_in(key, d * microbatches + i)`. Keys that are not named
            are the same in all parts, and so are the numbers drawn: say `keys=()` if they are to be.

    Returns:
        A function of the same arguments, whose arrays after the variables are split along
        their first axis; keyword arguments are not. The loss is the mean over the parts, the
        auxiliary outputs are stacked, the gradients are the mean, in `value_and_grad`'s
        formats. All parts are scaled by the state that came in; their amaxes merge by max.

    Raises:
        ValueError: an array's first axis does not divide by `microbatches`; no such number or format; a
            random key is given as a positional argument, or as a keyword argument without a word in `keys`.
        TypeError: `keys` are no names, `loss_fn` is no function, or `zero` no `Zero`.
    """
    if format not in ("FP16", "FP32", "E4M3"):
        raise ValueError(f"`format`: expected FP16, FP32 or E4M3; got {format!r}.")
    check_arguments(loss_fn, zero)
    _check_parts(microbatches)
    names = names_of(keys)
    make = functools.partial(_on_one_device, loss_fn, microbatches, has_aux, format, names or ())
    run = for_optimizers(loss_fn, make(None) if zero is None else over_devices(make, zero, has_aux))
    parts = microbatches if zero is None else microbatches * zero.devices

    @functools.wraps(loss_fn)
    def checked(variables: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_whole(args, parts, _ADVICE)
        check_named(names, kwargs)
        if not names and not jax.tree.leaves(args):
            raise ValueError("`args`: expected arrays of a batch after the variables; got none.")
        return run(variables, *args, **kwargs)

    return checked


_ADVICE = 'a keyword argument, with its name in `keys`, as in accumulate_gradients(..., keys="key")'


def _on_one_device(
    loss_fn: Callable[..., Any],
    microbatches: int,
    has_aux: bool,
    format: str,
    names: tuple[str, ...],
    local: ShardContext | None,
) -> Callable[..., Any]:
    grad_fn = on_one_device(loss_fn, has_aux, local)

    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        keys = {name: kwargs.pop(name) for name in names}

        def one(part: Any) -> Any:
            args, keys = part
            return grad_fn(variables, *args, **kwargs, **keys)

        def add(sums: Any, part: Any) -> tuple[Any, Any]:
            out, grads = one(part)
            return _add(sums, grads, microbatches), out

        first = 0 if local is None else lax.axis_index(local.zero.axis) * microbatches
        keys = jax.vmap(functools.partial(fold_in, keys))(first + jnp.arange(microbatches))
        parts = jax.tree.map(lambda x: _split(x, microbatches), args), keys
        _, shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
        sums, out = jax.lax.scan(add, _no_sums(shapes, format), parts)
        loss, aux = out if has_aux else (out, None)
        loss = jnp.mean(loss)
        grads = _finished(sums, shapes, variables, local)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def _check_parts(microbatches: Any) -> None:
    is_integer = hasattr(microbatches, "__index__") and not isinstance(microbatches, bool)
    if not is_integer or microbatches < 1:
        raise ValueError(f"`microbatches`: expected a positive integer; got {microbatches!r}.")


def _split(x: Any, parts: int) -> Any:
    if not jnp.ndim(x) or not len(x) or len(x) % parts:
        raise ValueError(
            f"a batch array's first axis must divide by `microbatches`={parts}, and not be 0; got shape "
            f"{jnp.shape(x)}. What is no batch goes in as a keyword argument."
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


def _finished(sums: Any, shapes: Any, variables: Any, local: ShardContext | None) -> Any:
    """The sums in the formats of gradients of these shapes."""
    params = shapes[PARAMS] if has_params(shapes) else shapes
    shardings = (
        jax.tree.map(lambda leaf: GradSharding(), params, is_leaf=is_scaled)
        if local is None
        else local.shardings
    )

    def narrow(like: Any, total: Any, sharding: GradSharding) -> Any:
        if not is_scaled(like):
            return total.astype(like.dtype)
        if sharding.shard is not None:
            return on_shared_scale(value(total), like.scale.shape, sharding.shard.axis_name)
        return quantize_gradient(total, like.scale.shape)

    if not has_params(sums):
        return jax.tree.map(narrow, shapes, sums, shardings, is_leaf=is_scaled)
    grads = {**sums, PARAMS: jax.tree.map(narrow, params, sums[PARAMS], shardings, is_leaf=is_scaled)}
    if SCALING in sums:
        old = variables[SCALING]
        grads[PARAMS], grads[SCALING] = narrowed(
            grads[PARAMS], variables[PARAMS], sums[SCALING], old, shardings
        )
    return grads
