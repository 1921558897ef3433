"""Gradient accumulation over microbatches, inside one step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.gradients.data_parallel import GradShardings, ShardContext, over_devices
from fp8jax.gradients.keys import check_batch, check_named, fold_in, names_of
from fp8jax.gradients.loss import AxisNames, check_arguments, on_one_device, with_state
from fp8jax.gradients.traced import in_blocks
from fp8jax.quantization import ScaledArray, format_of, is_scaled, quantize, value
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    microbatches: int,
    *,
    has_aux: bool = False,
    format: str = "FP16",
    zero: Zero | None = None,
    axis_name: AxisNames = None,
    keys: str | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`value_and_grad` in sequential microbatches, with the peak memory of one microbatch.

    Args:
        loss_fn: as in `value_and_grad`; the mean over the batch of a loss per example.
        microbatches: number of microbatches.
        has_aux: as in `value_and_grad`.
        format: format of the gradient sums of quantized kernels: "FP16" on power-of-two scales (each sum is
            rounded to 11 bits), "FP32", or "E4M3" as in MS-AMP. Other gradients are summed in float32.
        axis_name: as in `value_and_grad`.
        zero: as in `value_and_grad`; each device splits its part of the batch into microbatches.
        keys: names of the keyword arguments with random keys, e.g. for dropout. Each is a key or a tree of
            keys, as Linen's `rngs={"dropout": key}`. Microbatch i gets `jax.random.fold_in(key, i)`; with
            `zero`, microbatch i of device d gets `jax.random.fold_in(key, d * microbatches + i)`. Pass
            `keys=()` to use the same keys, and so the same random numbers, in all microbatches.

    Returns:
        A function of the same arguments that returns `(loss, grads, variables)`. It splits the arrays after
        the variables along their first axis, but not the keyword arguments. Microbatch i has the rows
        `x[i::microbatches]`, so that rows of a sharded batch stay on their devices. The loss is the mean over
        the microbatches, auxiliary outputs are stacked, and the gradients are the mean, in `value_and_grad`'s
        formats. All microbatches use the same incoming scaling state; their amaxes are merged by max.

    Raises:
        ValueError: an array's first axis is not divisible by `microbatches`; `microbatches` or `format` is
            not legal; the parameters hold scaling states; a random key is a positional argument, or a keyword
            argument not mentioned in `keys`; a name in `keys` is no keyword argument or has no random keys.
        TypeError: `keys` are not names, `loss_fn` is not a function, or `zero` is not a `Zero`.
    """
    if format not in ("FP16", "FP32", "E4M3"):
        raise ValueError(f"`format`: expected FP16, FP32 or E4M3; got {format!r}.")
    check_arguments(loss_fn, zero)
    if not hasattr(microbatches, "__index__") or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"`microbatches`: expected a positive integer; got {microbatches!r}.")
    names = names_of(keys)
    on_device = functools.partial(_on_one_device, microbatches, format, names or ())
    run = with_state(loss_fn, has_aux, over_devices(on_device, zero), zero, axis_name)
    parts, of = microbatches, f"`microbatches`={microbatches}"
    if zero is not None:
        parts, of = parts * zero.devices, f"{of} on each of {zero.devices} devices"

    @functools.wraps(loss_fn)
    def checked(variables: Any, *args: Any, **kwargs: Any) -> Any:
        check_batch(args, parts, of, _ADVICE)
        check_named(names, kwargs)
        if not jax.tree.leaves(args):
            others = jax.tree.leaves([x for name, x in kwargs.items() if name not in (names or ())])
            if not names or any(getattr(x, "ndim", 0) for x in others):  # else the loss draws its batch
                raise ValueError(
                    "`args`: expected arrays of a batch after the variables; got none. Keyword arguments are "
                    "not split: pass the batch as positional arguments."
                )
        return run(variables, *args, **kwargs)

    return checked


_ADVICE = 'a keyword argument, with its name in `keys`, as in accumulate_gradients(..., keys="key")'


def _on_one_device(
    microbatches: int,
    format: str,
    names: tuple[str, ...],
    context: ShardContext,
    loss_fn: Callable[..., Any],
    variables: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any, GradShardings]:
    """The mean loss and the mean gradients of a device's microbatches, see `loss.on_one_device`."""

    def one(part: Any) -> Any:
        args, keys, number = part
        return on_one_device(context, loss_fn, variables, args, {**kwargs, **keys}, number)

    def add(sums: Any, part: Any) -> tuple[Any, Any]:
        out, grads, _ = one(part)
        return _add(sums, grads, microbatches), out

    numbers = context.device_index * microbatches + jnp.arange(microbatches)
    keys = jax.vmap(functools.partial(fold_in, {name: kwargs[name] for name in names}))(numbers)
    # Every microbatch has rows of every device, so that a sharded batch stays where it is.
    rows = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), args)
    _, shapes, shardings = jax.eval_shape(one, jax.tree.map(lambda x: x[0], (rows, keys, numbers)))
    sums, (losses, aux) = jax.lax.scan(add, _no_sums(shapes, format), (rows, keys, numbers))
    return (jnp.mean(losses), aux), _finished(sums, shapes, shardings), shardings


def _no_sums(grads: Any, format: str) -> Any:
    """The initial sums of gradients with these shapes, and the identities of the merged states."""
    sums = formats.get(format)

    def zeros(leaf: Any) -> Any:
        if is_scaled(leaf) and sums != formats.FP32:
            return ScaledArray(jnp.zeros_like(leaf.data, sums.dtype), jnp.ones_like(leaf.scale))
        return jnp.zeros_like(leaf.data if is_scaled(leaf) else leaf, jnp.float32)

    def unseen(tree: Any, least: float) -> Any:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, least), tree)

    start = {PARAMS: jax.tree.map(zeros, grads[PARAMS], is_leaf=is_scaled)}
    least = {SCALING: -jnp.inf, LOSS_SCALE: 2**30}
    return start | {name: unseen(grads[name], least[name]) for name in grads if name != PARAMS}


def _add(sums: Any, grads: Any, parts: int) -> Any:
    """Adds one microbatch's gradients, divided by the number of microbatches, and merges its states."""

    def add(total: Any, grad: Any) -> Any:
        new = value(total) + value(grad).astype(jnp.float32) / parts
        if not is_scaled(total):
            return new
        return quantize(new, format_of(total), power_of_two=True, blocks=total.scale.shape)

    # One microbatch with inf or NaN lowers the loss scale.
    merge = {SCALING: jnp.maximum, LOSS_SCALE: jnp.minimum}
    others = {name: jax.tree.map(merge[name], sums[name], grads[name]) for name in grads if name != PARAMS}
    return {PARAMS: jax.tree.map(add, sums[PARAMS], grads[PARAMS], is_leaf=is_scaled), **others}


def _finished(sums: Any, shapes: Any, shardings: GradShardings) -> Any:
    """The sums converted to the gradients' formats."""
    likes, treedef = jax.tree.flatten(shapes[PARAMS], is_leaf=is_scaled)
    rows = zip(likes, treedef.flatten_up_to(sums[PARAMS]), shardings.of_params, strict=True)
    grads = [
        in_blocks(value(total), like.scale.shape, sharding.shard)
        if is_scaled(like)
        else total.astype(like.dtype)
        for like, total, sharding in rows
    ]
    return sums | {PARAMS: treedef.unflatten(grads)}
