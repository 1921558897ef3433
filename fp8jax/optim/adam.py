"""Adam whose moments are kept in the formats of the recipe's `moments` column.

Each step, in float32, per tensor:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    direction = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)

with the new m and v not yet rounded; then they are rounded to their formats, each tensor on
a fresh power-of-two scale. E4M3 + FP16 costs 3 bytes per parameter instead of 8.

A step is computed twice (`fused`), so that a GPU stores no float32 copy of a tensor.

A step that would make any weight or moment infinite or NaN changes none, and is counted.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax import formats
from fp8jax.comm import Zero
from fp8jax.optim.arithmetic import DECOUPLED, L2, NO_DECAY, AdamScalars, ParamState
from fp8jax.optim.codecs import blockwise_zeros, zeros
from fp8jax.optim.devices import advance_over_devices
from fp8jax.optim.fused import as_written, fused_adam
from fp8jax.optim.links import on_params, plain_mask
from fp8jax.optim.nnx_variables import in_variables, with_variables_inside, without_variables
from fp8jax.optim.state import AdamState, is_adam_state
from fp8jax.optim.told import check_rate, check_weights, recipe_of, refuse_8_bits
from fp8jax.platforms import with_auto_axes
from fp8jax.recipe import Recipe
from fp8jax.scaled import format_of, is_scaled, plain, quantize, value, with_float32_scales
from fp8jax.variables import PARAMS, has_params

Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The hyperparameters; without a learning rate a step moves no weights."""

    recipe: Recipe | None
    b1: Any
    b2: Any
    eps: Any
    learning_rate: Any = None
    weight_decay: Any = 0.0
    mask: Any = None
    decay: str = NO_DECAY
    zero: Zero | None = None
    in_8_bits: bool = False


def scale_by_adam(
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    zero: Zero | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with the recipe's moments.

    Args:
        recipe: its `moments` column is read: FP32+FP32, or E4M3+FP16; None is E4M3+FP16, see `adam`.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        zero: see `adam`.

    Returns:
        A link whose state is an `AdamState` without masters. Updates are float32, and zero
        where a step is skipped.

    Raises:
        ValueError: the recipe keeps master weights, which only `adam` and `adamw` can; from `init`, weights
            that need them, or other weights than the recipe's.
    """
    row = recipe_of(recipe)
    if row is not None and row.master_weight != "-":
        raise ValueError(
            f"`recipe`: {row} keeps master weights, which are updated by `adam` and `adamw`; use one of them."
        )
    return _optimizer(_Rule(row, b1, b2, eps, zero=zero))


def adam(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    mask: Any = None,
    zero: Zero | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam; weight decay, if any, is added to the gradient (L2), as in MS-AMP's `LBAdam`.

    Args:
        learning_rate: number or schedule.
        recipe: that of the model, or None: the weights' formats are then read from the parameters. FP8
            weights get FP16 masters, others none, and moments are E4M3 + FP16 as O2 and O3 have them: a
            column of the optimizer alone, which no array tells (weights are the same in O1, with float32
            moments, and O2). Say "O1" with FP16 weights, or "te" with plain ones, for float32 moments.
        b1, b2, eps: as in `scale_by_adam`.
        weight_decay: strength of the L2 term.
        mask: which parameters decay: a tree of booleans, or a function that gives one from
            the parameters (a `ScaledArray` counts as one leaf of its value's shape).
        zero: over which devices, and how, gradients, moments and masters are spread, as was said to
            `value_and_grad`; the state is placed so by `init`, and the step is taken in parts. (Without
            it arrays may be sharded in any way, and the step is what XLA makes of it.)

    Returns:
        An optimizer whose state is an `AdamState`; `update` needs the parameters. Updates of
        plain parameters are float32 arrays to add; those of `ScaledArray`s are their new
        values (`Overwrite`), which `fp8jax.apply_updates` puts in place. Links that change
        updates therefore come before it.

    Raises:
        TypeError: `learning_rate` is a recipe.
        ValueError: from `init`, the recipe has weights in another format than the parameters' scaled ones.
    """
    check_rate(learning_rate)
    row = recipe_of(recipe)
    return _optimizer(_Rule(row, b1, b2, eps, learning_rate, weight_decay, mask, L2, zero))


def adamw(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    zero: Zero | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW: `optax.adamw` with the recipe's moments.

    Args: as in `adam`; the weight decay is decoupled: `learning_rate * weight_decay * w` is
        subtracted from the weight.

    Returns, raises: as `adam`.
    """
    check_rate(learning_rate)
    row = recipe_of(recipe)
    return _optimizer(_Rule(row, b1, b2, eps, learning_rate, weight_decay, mask, DECOUPLED, zero))


def adamw_8bit(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    zero: Zero | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose moments are codes of 8 bits with an absmax for each block of 256: bitsandbytes' AdamW8bit.

    2.03 bytes per parameter. Moments of arrays with fewer than 4096 numbers stay float32; a stack of scanned
    layers is one array. What differs from bitsandbytes' CUDA kernels: a code is the nearest one, also where
    its sign is then another than the moment's, and a step with a bad number is skipped, as in `adam`.

    Args: as in `adamw`; of the recipe's moments nothing is read.
        zero: None; blocks are not those of a tensor's parts.

    Returns: as `adam`; `moments` gives trees of `Blockwise` moments, and of float32 arrays.

    Raises:
        ValueError: `zero` is given; otherwise as `adam`.

    References:
        8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861; see `blockwise`.
    """
    refuse_zero(zero, "adamw_8bit", "its blocks of 256 numbers are not those of a tensor's parts")
    check_rate(learning_rate)
    row = recipe_of(recipe)
    return _optimizer(_Rule(row, b1, b2, eps, learning_rate, weight_decay, mask, DECOUPLED, None, True))


def refuse_zero(zero: Zero | None, name: str, reason: str) -> None:
    """Raises ValueError if `zero` is given to the optimizer of this name."""
    if zero is not None:
        raise ValueError(
            f"`zero`: expected None, for {name} spreads no state over devices: {reason}; got a Zero. Use "
            "adamw, or leave `zero` to `value_and_grad` with stage 0."
        )


def with_masters(state: Any, params: Any) -> Any:
    """An optimizer state whose master weights are those of a wider model.

    `init` can only give them the values of the FP8 weights; this gives them a checkpoint's.

    Args:
        state: an optimizer state, with one `adam` or `adamw` in it.
        params: parameters of the same structure, plain arrays or `ScaledArray`s, or whole
            variables.
    """

    def rebuild(node: Any) -> Any:
        if not is_adam_state(node):
            return node
        tree = params[PARAMS] if has_params(params) else params
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_scaled)
        masters = treedef.flatten_up_to(node.master)
        new = [m if m is None else _like(m, value(leaf)) for m, leaf in zip(masters, leaves, strict=True)]
        return node._replace(master=treedef.unflatten(new))

    return jax.tree.map(rebuild, state, is_leaf=is_adam_state)


def _like(kept: Any, new: jax.Array) -> Any:
    """A float32 array in the format of what is kept in its place."""
    if not is_scaled(kept):
        return new.astype(jnp.float32)
    return quantize(new, format_of(kept), power_of_two=True, blocks=kept.scale.shape)


def _optimizer(rule: _Rule) -> optax.GradientTransformationExtraArgs:
    recipe = rule.recipe or Recipe.O3  # its masters are for 8-bit weights alone

    def init(params: Any) -> AdamState:
        check_weights(rule.recipe, params)
        if rule.learning_rate is None:
            refuse_8_bits(params)

        def first(number: int) -> Any:
            format = formats.get(recipe.moments[number])

            def of_one(param: Any) -> Any:
                return blockwise_zeros(param, signed=number == 0) if rule.in_8_bits else zeros(param, format)

            return jax.tree.map(of_one, params, is_leaf=is_scaled)

        master = jax.tree.map(lambda p: _master_of(p, recipe), params, is_leaf=is_scaled)
        kept = [first(0), first(1), master]
        if rule.zero is not None:
            kept = [rule.zero.place_state(tree, params) for tree in kept]
        mu, nu, master = (with_variables_inside(tree) for tree in kept)
        adam = optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)
        return AdamState(adam, master, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        if params is None and rule.learning_rate is not None:
            raise ValueError(
                "`params`: expected the parameters; got None. Call `update(grads, state, params)`."
            )
        # Of an NNX model's states in whole each leaf stands in a variable.
        boxes = updates, state.adam.mu, state.adam.nu, state.master
        updates, *kept = map(without_variables, boxes)
        params = with_float32_scales(without_variables(params))
        grads, treedef = jax.tree.flatten(jax.tree.map(plain, updates, is_leaf=is_scaled), is_leaf=is_scaled)
        count = optax.safe_increment(state.adam.count)
        scalars = AdamScalars(
            (rule.b1, rule.b2),
            (1 - rule.b1, 1 - rule.b2),
            (1 - jnp.float32(rule.b1) ** count, 1 - jnp.float32(rule.b2) ** count),
            rule.eps,
            rule.learning_rate(state.adam.count) if callable(rule.learning_rate) else rule.learning_rate,
            rule.weight_decay,
        )
        scalars = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), scalars)
        kept = [treedef.flatten_up_to(tree) for tree in kept]
        olds = [None] * len(grads) if rule.learning_rate is None else treedef.flatten_up_to(params)
        mu, nu, master = kept
        leaves = [ParamState(*parts) for parts in zip(grads, mu, nu, olds, master, strict=True)]
        _check_shapes(leaves)
        decays = _decays(rule, treedef, params)
        if rule.zero is None:
            step = functools.partial(fused_adam, decays=decays)
            new, ok = with_auto_axes(step, as_written, leaves, scalars)
        else:
            new, ok = advance_over_devices(rule.zero, leaves, scalars, decays)
        directions, mu, nu, master = (
            in_variables(boxes[i], treedef.unflatten([leaf[i] for leaf in new])) for i in range(4)
        )
        adam = optax.ScaleByAdamState(jnp.where(ok, count, state.adam.count), mu, nu)
        return directions, AdamState(adam, master, state.skipped + jnp.where(ok, 0, 1))

    return on_params(optax.GradientTransformation(init, update))


def _check_shapes(leaves: list[ParamState]) -> None:
    for leaf in leaves:
        if leaf.grad.shape != leaf.mu.shape:
            raise ValueError(
                f"`updates`: expected gradients of the shapes that `init` saw, here {leaf.mu.shape}; got "
                f"{leaf.grad.shape}."
            )


def _decays(rule: _Rule, treedef: Any, params: Any) -> tuple[str, ...]:
    """The kind of decay of each leaf."""
    if rule.learning_rate is None or rule.mask is None:
        return (rule.decay,) * treedef.num_leaves
    mask: Any = plain_mask(rule.mask)
    mask = mask(params) if callable(mask) else mask
    spread = jax.tree.map(lambda m, below: jax.tree.map(lambda _: m, below, is_leaf=is_scaled), mask, params)
    return tuple(rule.decay if decays else NO_DECAY for decays in treedef.flatten_up_to(spread))


def _master_of(param: Any, recipe: Recipe) -> Any:
    """The master of a parameter that is kept in the recipe's weight format, where it has one."""
    if recipe.master_weight == "-" or not is_scaled(param) or format_of(param).name != recipe.weight:
        return None
    format = formats.get(recipe.master_weight)
    if format == formats.FP32:
        return value(param)
    return quantize(value(param), format, power_of_two=True, blocks=param.scale.shape)
