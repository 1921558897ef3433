"""Checks of an optimizer's arguments.

The parameters' dtypes show the weight format. A recipe with another weight format belongs to another model,
and raises.
"""

import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from fp8jax import formats
from fp8jax import recipe as recipes
from fp8jax.comm import Zero
from fp8jax.optim.storage import Storage
from fp8jax.quantization import format_of, is_scaled, refuse_dicts
from fp8jax.recipe import Recipe


def recipe_of(recipe: Recipe | str | None) -> Recipe | None:
    """The parsed `recipe`, or None."""
    return None if recipe is None else Recipe.parse(recipe)


def check_rate(learning_rate: Any) -> None:
    """Raises TypeError if `learning_rate` is a recipe, and ValueError if it is no finite number from 0 on."""
    if isinstance(learning_rate, str | Recipe):
        raise TypeError(
            f"`learning_rate`: expected a number or a schedule; got {str(learning_rate)!r}. The rate comes "
            "first, then the recipe: adamw(3e-4, 'O2')."
        )
    if learning_rate is not None and not callable(learning_rate):
        check_number("learning_rate", learning_rate)


def check_adam(b1: Any, b2: Any, eps: Any, weight_decay: Any, seed: Any) -> None:
    """Raises ValueError for hyperparameters of Adam that are not legal."""
    check_number("b1", b1, below=1)
    check_number("b2", b2, below=1)
    check_number("eps", eps)
    check_number("weight_decay", weight_decay)
    check_seed(seed)


def check_number(name: str, given: Any, *, below: float = math.inf, or_inf: bool = False) -> None:
    """Raises ValueError unless an argument is a number from 0 on and below a limit, of Python or of 32 bits
    or more. The values of tracers pass.

    Args:
        name: of the argument.
        given: its value.
        below: the limit.
        or_inf: whether the argument may be infinite.
    """
    dtype = getattr(given, "dtype", None)
    if dtype is not None and dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`{name}`: expected a number in float32; got {given!r}. optax.inject_hyperparams casts numbers "
            "to the dtype of a parameter, in which 0.999 or 1e-8 is another number: say "
            "inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
        )
    number = _value_of(name, given)
    if number is not None and not (0 <= number < below or (or_inf and number == math.inf)):
        kind = "number" if or_inf else "finite number"
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"`{name}`: expected a {kind} from 0 on{limit}; got {number:g}.")


def check_seed(seed: Any) -> None:
    """Raises ValueError unless `seed` is an integer of 32 bits. Tracers pass."""
    number = _value_of("seed", seed)
    if number is not None and not (number == int(number) and 0 <= number < 2**32):
        raise ValueError(f"`seed`: expected an integer from 0 to 2**32 - 1; got {seed}.")


def _value_of(name: str, given: Any) -> Any:
    """A number as a Python number; None for a tracer."""
    if isinstance(given, jax.core.Tracer):
        return None
    if isinstance(given, numbers.Real):
        return given
    if getattr(given, "shape", None) != ():
        raise TypeError(f"`{name}`: expected a number; got {given!r}.")
    return given.item()


def check_params(params: Any) -> None:
    """Raises ValueError without parameters."""
    if params is None:
        raise ValueError("`params`: expected the parameters; got None. Call `update(grads, state, params)`.")


def check_state(state: Any, kind: type[Any]) -> None:
    """Raises TypeError if `state` is not of this kind."""
    if not isinstance(state, kind):
        raise TypeError(
            f"`state`: expected the `{kind.__name__}` that this optimizer's `init` returns; got a "
            f"{type(state).__name__}. Call `update(grads, state, params)`, and `init` for another optimizer."
        )


def check_weights(recipe: Recipe | None, params: Any) -> None:
    """Raises ValueError if the parameters' format is not the recipe's, see `recipe.check_weights`, and
    TypeError if they are dicts of codes and scales."""
    refuse_dicts(params)
    leaves = jax.tree.leaves(params, is_leaf=is_scaled)
    if recipe is not None:
        recipes.check_weights(recipe, {format_of(leaf).name for leaf in leaves if is_scaled(leaf)})


def refuse_8_bits(params: Any) -> None:
    """Raises ValueError for 8-bit weights. For optimizers without master weights."""
    for leaf in jax.tree.leaves(params, is_leaf=is_scaled):
        if is_scaled(leaf) and format_of(leaf).bits == 8:
            raise ValueError(
                f"`params`: expected weights of 16 bits or more; got {format_of(leaf).name}"
                f"{list(leaf.shape)}, in which small steps are lost. adam, adamw and adamw_8bit keep masters."
            )


def refuse_complex(name: str, tree: Any) -> None:
    """Raises ValueError for complex parameters or gradients: Adam and Muon compute in float32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        if not is_scaled(leaf) and jnp.iscomplexobj(leaf):
            raise ValueError(
                f"`{name}`: expected real numbers; got {leaf.dtype}{list(leaf.shape)} at "
                f"{jax.tree_util.keystr(path)}. Say optax.contrib.split_real_and_imaginary(...) around the "
                "optimizer, which trains both parts."
            )


def refuse_rounding(recipe: Recipe | None, params: Any) -> None:
    """Raises ValueError for quantized or 16-bit weights that the recipe does not round to nearest. For
    optimizers that do not write the weights."""
    if recipe is not None and recipe.rounding[1] != "nearest":
        leaves = jax.tree.leaves(params, is_leaf=is_scaled)
        if any(is_scaled(leaf) or _is_16_bits(leaf) for leaf in leaves):
            raise ValueError(
                f"`recipe`: expected one that rounds weights to nearest; got {recipe} with rounding="
                f"{'+'.join(recipe.rounding)}. adam and adamw round weights so; use one of them, or O2."
            )


def refuse_zero(zero: Zero | None, name: str, reason: str) -> None:
    """Raises ValueError if `zero` is given to the optimizer `name`."""
    if zero is not None:
        raise ValueError(
            f"`zero`: expected None, for {name} spreads no state over devices: {reason}; got a Zero. Use "
            "adamw, or leave `zero` to `value_and_grad` with stage 0."
        )


def check_groups(zero: Zero | None, moments: Any) -> None:
    """Raises ValueError if the shards of a moment would cut groups with a scale each."""
    if zero is None or not zero.shards_states:
        return
    for moment in filter(_is_storage, jax.tree.leaves(moments, is_leaf=_is_storage)):
        if zero.split_of(jax.ShapeDtypeStruct(moment.shape, jnp.float32)) != -1:
            continue
        if (moment.shape[-1] // zero.devices) % moment.group:
            raise ValueError(
                f"`zero`: expected rows, or {moment.group} times columns, for {zero.devices} devices, "
                f"as {moment.name} has a scale for each {moment.group} entries of a row; got a parameter "
                f"{moment.shape}. {moment.instead}"
            )


def _is_storage(node: Any) -> bool:
    return isinstance(node, Storage)


def warn_of_rounding(recipe: Recipe | None, params: Any, rate: Any, b1: Any, b2: Any) -> None:
    """Warns of what rounding to nearest loses with these hyperparameters; those that are not known pass.

    Args:
        recipe: its `rounding` says what is rounded to nearest; None for the default moments.
        params: the parameters.
        rate: the learning rate or a schedule; None without one.
        b1, b2: decay rates of the moments; None for moments in other formats than the recipe's.
    """
    name, row = str(recipe or "recipe=None"), recipe or Recipe.O3
    rate, b1, b2 = (x if x is None or callable(x) else _value_of("", x) for x in (rate, b1, b2))
    lost = [*_lost_decay(row, b1, b2), *_lost_steps(row, params, rate)]
    if lost:
        warnings.warn(
            f"{name} rounds to nearest: {'; and '.join(lost)}. Take the recipe fp8, or another `rounding`.",
            stacklevel=2,
        )


def _lost_decay(recipe: Recipe, b1: Any, b2: Any) -> list[str]:
    """The line of a first moment that does not decay to zero, if rows without gradients drift by it."""
    format = formats.get(recipe.moments[0])
    if format.bits > 8 or recipe.rounding[0] != "nearest" or not _are_numbers(b1, b2):
        return []
    # The second code of a binade stays where b1 takes less than half an ulp of it.
    sticks = b1 > 1 - 0.5 / (2**format.mantissa_bits + 1)
    # Subnormal codes stay with any b1 above a half. Their updates stay small for as long as v remembers.
    if b1 <= 0.5 or (b2 >= 0.999 and not sticks):
        return []
    return [
        f"with b1={b1:g} and b2={b2:g}, {format} first moments do not decay to zero, so rows that seldom "
        "have a gradient, as those of an embedding, drift"
    ]


def _lost_steps(recipe: Recipe, params: Any, rate: Any) -> list[str]:
    """The line of a learning rate below the last bit of typical 16-bit weights."""
    if recipe.rounding[1] != "nearest":
        return []
    leaves = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_scaled) if getattr(leaf, "size", 0)]
    leaves = [leaf for leaf in leaves if {"FP16", "BF16"} & {*_weights_of(leaf, recipe)}]
    largest = ", the largest of a schedule's," if callable(rate) else ""
    rate = _largest_rate(rate) if leaves and callable(rate) else rate
    if not _are_numbers(rate):
        return []
    for name in ("FP16", "BF16"):
        of_name = [leaf for leaf in leaves if name in _weights_of(leaf, recipe)]
        if not of_name:
            continue
        # The standard deviation of a square kernel by Glorot's initialization.
        typical = max(leaf.size / max(_count_of_scales(leaf), 1) for leaf in of_name) ** -0.25
        ulp = 2.0 ** (math.floor(math.log2(typical)) - formats.get(name).mantissa_bits)
        if 0 < rate < ulp:
            return [
                f"learning_rate={rate:g}{largest} is below the last bit ({ulp:.1g}) of {name} weights of "
                f"{typical:.1g}, which are typical of the largest kernel, so most steps change nothing"
            ]
    return []


def _largest_rate(schedule: Callable[[Any], Any]) -> float:
    """The largest learning rate of a schedule at 80 steps up to a million, closer to each other in the
    beginning; infinity where it is not known while tracing, or not for all of these steps."""
    steps = sorted({0, *(round(2 ** (i / 4)) for i in range(81))})
    try:
        with jax.ensure_compile_time_eval():
            return max(float(schedule(jnp.int32(step))) for step in steps)
    except Exception:  # the user's function; a warning is no reason to stop
        return math.inf


def _weights_of(leaf: Any, recipe: Recipe) -> tuple[str, ...]:
    """The formats of a weight and its master weight."""
    if is_scaled(leaf):
        return format_of(leaf).name, recipe.master_weight
    return (format_of(leaf).name,) if _is_16_bits(leaf) else ()


def _is_16_bits(leaf: Any) -> bool:
    """Whether a parameter is a plain bfloat16 or float16 array."""
    return not is_scaled(leaf) and getattr(leaf, "dtype", None) in (formats.BF16.dtype, formats.FP16.dtype)


def _count_of_scales(leaf: Any) -> int:
    return math.prod(leaf.scale.shape) if is_scaled(leaf) else 1


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, numbers.Real) for value in values)
