"""`value_and_grad`: the loss, the gradients, and the variables with the new scaling state."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax import loss_scale
from fp8jax.comm import Zero
from fp8jax.gradients.data_parallel import GradFn, GradShardings, ShardContext, over_devices
from fp8jax.gradients.keys import shown
from fp8jax.gradients.traced import gradient
from fp8jax.platforms import checked_axes
from fp8jax.quantization import as_gradients
from fp8jax.scaling.merge import OF_WEIGHTS, from_cotangents, settled
from fp8jax.scaling.seeds import for_part, of_whole
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING, has_params, with_collections

# Names of mesh axes: one, several, or None where none were named.
AxisNames = str | Sequence[str] | None


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    zero: Zero | None = None,
    axis_name: AxisNames = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for variables with quantized weights and scaling state.

        loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables, batch)

    The scaling state goes in and out as state, as batch statistics do: pass on the variables that come back.

    Args:
        loss_fn: `loss_fn(variables, *args, **kwargs)` returns a scalar, or with `has_aux` a pair of a scalar
            and auxiliary outputs.
        has_aux: as in `jax.value_and_grad`.
        zero: shards the batch over devices, see `fp8jax.comm.Zero`. Each device calls `loss_fn` inside
            `jax.shard_map` with its part of all positional arguments along their first axis; keyword
            arguments are replicated. `loss_fn` must be a mean over the batch. The loss, gradients and scaling
            states are those of the whole batch; auxiliary outputs are stacked over the devices.
        axis_name: inside a `jax.shard_map` of yours, the mesh axes over which the batch is split: a name, or
            several. Not with `zero`, which maps over the devices itself. The new scaling states are merged by
            max over them, and the new loss scales by min; average the gradients yourself.
            `()` leaves each device with states of its own. The `jax.shard_map` must have `check_vma=False`:
            under JAX's default JAX itself sums the gradients of parameters that are the same on all devices,
            and scaling states and FP8 gradients have no sum.

    Returns:
        A function of the same arguments that returns `(loss, grads, variables)`, or
        `((loss, aux), grads, variables)`.

        grads: a tree like `variables["params"]`. It has an array of the same dtype for each array. For a
            `ScaledArray` weight it has an E4M3 `ScaledGradient` with a power-of-two scale if the recipe's
            weight gradients are FP8, otherwise a float32 array.
        variables: the variables that went in, with the new scaling state and loss scale. If a layer is used
            more than once, its amaxes are merged by max; the state of an unused layer does not change.

        With parameters alone in place of variables, `grads` is a tree like them, and they come back.

    Raises:
        ValueError: with `zero`, a batch array's first axis is not divisible by the number of devices, or
            there are no arguments after the variables, or a sharding constraint in the loss names the mesh
            axis of the batch; `loss_fn` casts or scales the scaling states; parameters are float16 and the
            recipe has a loss scale; the parameters hold scaling states, as those of two models' variables in
            one tree do; the function runs inside `jax.shard_map` with a scaling state, and `axis_name` is
            None or `check_vma` is True.
        TypeError: `loss_fn` is not a function or does not return a loss, or `zero` is not a `Zero`.

    References:
        FP8-LM, arXiv 2310.18313, section 2.1 (FP8 gradients); MS-AMP `ScalingParameter`.
    """
    check_arguments(loss_fn, zero)
    return with_state(loss_fn, has_aux, over_devices(on_one_device, zero), zero, axis_name)


def check_arguments(loss_fn: Any, zero: Any) -> None:
    """Raises TypeError if `loss_fn` is not callable or `zero` is not a `Zero`."""
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn`: expected a function; got {type(loss_fn).__name__}. Give the function that computes "
            "the loss, then call the result with that function's arguments."
        )
    if not isinstance(zero, Zero | None):
        raise TypeError(
            f"`zero`: expected a fp8jax.comm.Zero or None; got {zero!r}. Make one, as in "
            "fp8jax.comm.Zero(mesh, stage=2)."
        )


def with_state(
    loss_fn: Callable[..., Any], has_aux: bool, grad_fn: GradFn, zero: Zero | None, axis_name: AxisNames
) -> Callable[..., Any]:
    """The gradient function at the user's boundary: `(loss, grads, variables)`, see `value_and_grad`.

    Args:
        loss_fn, has_aux, zero, axis_name: see `value_and_grad`.
        grad_fn: computes the gradients and the new states.

    Raises:
        ValueError: both `zero` and `axis_name` are given.
    """
    if zero is not None and axis_name:
        raise ValueError(
            f"`axis_name`: expected None beside `zero`, which maps over the devices itself; got "
            f"{axis_name!r}. Take one of them."
        )

    @functools.wraps(loss_fn)
    def wrapped(variables: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = has_params(variables)

        def loss_and_aux(variables: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            out = loss_fn(variables if is_whole else variables[PARAMS], *args, **kwargs)
            return _loss_and_aux(out, has_aux)

        old = variables if is_whole else {PARAMS: variables}
        _check_params(old[PARAMS])
        grad = functools.partial(grad_fn, loss_and_aux, old, args, kwargs)
        # Without jit, `jax.shard_map` and JAX's checks for NaN lack the dtypes of states and FP8 gradients.
        is_mapped = bool(jax.sharding.get_abstract_mesh().manual_axes)
        grad = jax.jit(grad) if is_mapped or jax.debug_nans.value else grad
        with _clear_errors(has_state=SCALING in old):
            out, new = grad()
        out = out if has_aux else out[0]
        grads = as_gradients(new.pop(PARAMS))
        if zero is None:
            new = _merged(new, axis_name)
        if SCALING in new:
            new[SCALING] = _jitted_settled(new[SCALING], old[SCALING])
        return out, grads, with_collections(variables, new) if is_whole else variables

    return wrapped


def _check_params(params: Any) -> None:
    """Raises ValueError if a part of the parameters is a model's variables with scaling states.

    The root may be: a function's own parameters are perhaps Flax's variables, with Flax's own FP8 states.
    """
    nodes, _ = jax.tree.flatten_with_path(params, is_leaf=_has_state)
    if at := next((jax.tree_util.keystr(path) for path, node in nodes if _has_state(node)), None):
        raise ValueError(
            f"`variables`: expected {SCALING!r} beside the parameters; got one inside of them, at {at}, "
            "where scaling states would never change. Put the models into the collections: "
            f"{{{PARAMS!r}: {{name: ...}}, {SCALING!r}: {{name: ...}}}}. Make a frozen model, such as a "
            "teacher, an argument of the loss."
        )


def _has_state(node: Any) -> bool:
    return isinstance(node, Mapping) and SCALING in node


# JAX's errors for casts and arithmetic of scaling states.
_OF_ARITHMETIC = (
    ("Cannot convert_element_type from fp8_meta",),
    ("fp8_meta", "is not a valid dtype for JAX type promotion"),
    ("'UndefinedPrimal' object has no attribute 'dtype'",),
)


@contextlib.contextmanager
def _clear_errors(has_state: bool) -> Iterator[None]:
    """Replaces JAX's errors where it cannot handle the dtypes of states and FP8 gradients."""
    try:
        yield
    except NotImplementedError as error:
        # JAX's error has no text.
        if str(error) or not (jax.debug_nans.value or jax.debug_infs.value):
            raise
        raise FloatingPointError(
            "`jax_debug_nans` or `jax_debug_infs`: JAX runs the step without jit to name the operation that "
            "made a NaN or an infinity, and cannot do so with scaling states. Run the step with the recipe "
            "bf16 under the same flag. Under `jax_debug_infs` a step with scaling states has to be jitted."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        if has_state and any(all(part in str(error) for part in parts) for parts in _OF_ARITHMETIC):
            raise ValueError(
                "`loss_fn`: expected scaling states that go to the model as they are; got a cast of them, or "
                f"other arithmetic. {OF_WEIGHTS}"
            ) from error
        if not all(part in str(error) for part in ("manual axis types do not match", "fp8_meta")):
            raise
        raise ValueError(
            "`check_vma`: expected jax.shard_map(..., check_vma=False) around gradients with a scaling state "
            "or FP8 weights; got True, JAX's default, under which JAX sums gradients over the devices, and "
            "these cannot be summed."
        ) from error


def _merged(states: dict[str, Any], axis_name: AxisNames) -> dict[str, Any]:
    """The new states and loss scale, merged over the axes of a `jax.shard_map` around this gradient."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name is None and axes and jax.tree.leaves(states):
        names = ", ".join(map(repr, axes))
        raise ValueError(
            f"`axis_name`: expected the mesh axes over which the batch is split; got None inside of "
            f"`jax.shard_map` over {names}, where each device sees other amaxes. Pass their names, as in "
            f"value_and_grad(loss_fn, axis_name={axes[0]!r}), to merge the scaling states over them, or () "
            "for states of each device."
        )
    if not axis_name or not jax.tree.leaves(states):
        return states
    axes = checked_axes(axis_name)
    merge = {SCALING: lax.pmax, LOSS_SCALE: lax.pmin}
    return {name: merge[name](x, axes) for name, x in states.items()}


_jitted_settled = jax.jit(settled)


def on_one_device(
    context: ShardContext,
    loss_fn: Callable[..., Any],
    variables: Any,
    args: Any,
    kwargs: Any,
    part: Any = None,
) -> tuple[Any, Any, GradShardings]:
    """A `GradFn` on one device, perhaps one of many with its shards of the variables; see `over_devices`.

    `part` is the number of this part of the batch, by default the device's. The loss is divided by the number
    of devices. Dots reduce some gradients over the devices; `over_devices` reduces the others. The scaling
    states are not yet `settled`, so that they can be merged with those of other microbatches and devices.
    """

    inside = {name: tree for name, tree in variables.items() if name != LOSS_SCALE}
    if SCALING in variables:
        inside[SCALING] = for_part(variables[SCALING], context.device_index if part is None else part)
    scale = variables[LOSS_SCALE]["scale"] if LOSS_SCALE in variables else None
    scaled = functools.partial(_scaled_loss, loss_fn, context.devices, scale)
    out, grads, new, shardings = gradient(context, scaled, inside, args, kwargs)
    if SCALING in new:
        new[SCALING] = of_whole(from_cotangents(new[SCALING]), variables[SCALING])
    new[PARAMS] = grads
    if scale is not None:
        new[PARAMS], new[LOSS_SCALE] = loss_scale.unscale(grads, variables[LOSS_SCALE])
    return out, new, shardings


def _scaled_loss(
    loss_fn: Callable[..., Any], devices: int, scale: Any, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The loss to differentiate, with loss scaling if `scale` is not None; and the loss to report with the
    auxiliary outputs."""
    loss, aux = loss_fn(*args, **kwargs)
    mean = loss if devices == 1 else loss / devices
    return (mean if scale is None else mean * scale), (mean, aux)


def _loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    loss, aux = out if has_aux and is_pair else (out, None)
    is_scalar = isinstance(loss, float) or getattr(loss, "shape", None) == ()
    if (has_aux and not is_pair) or not is_scalar or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"`loss_fn`: expected a float scalar{' and auxiliary outputs' if has_aux else ''} as its result; "
            f"got {jax.tree.map(shown, out)}. Return the mean over the batch, and to return more than that, "
            "return a pair and pass `has_aux=True`."
        )
    return loss, aux
