"""Adam with moments in the formats of the recipe's `moments` column.

A step computes in float32, for each tensor:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    direction = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)

The direction uses m and v before they are rounded. Then m and v are rounded to their formats, each tensor on
a new power-of-two scale. E4M3 + FP16 moments take 3 bytes per parameter instead of 8.

On a GPU a step is computed twice (`step.fused`), so that no float32 copy of a tensor is stored.

A step that would make any weight or moment infinite or NaN is skipped and counted.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.comm import Zero
from fp8jax.optim import checks
from fp8jax.optim.convert import check_formats
from fp8jax.optim.first_state import first_key, first_state
from fp8jax.optim.lost_tags import check_finite_scales, check_tags
from fp8jax.optim.nnx_variables import filled, in_variables, with_variables_inside, without_variables
from fp8jax.optim.state import AdamState
from fp8jax.optim.step import (
    DECOUPLED,
    L2,
    NO_DECAY,
    AdamScalars,
    ParamState,
    Rounding,
    advance_over_devices,
    as_written,
    fused_adam,
)
from fp8jax.optim.transforms import plain_mask, takes_variables
from fp8jax.platforms import with_auto_axes
from fp8jax.quantization import (
    is_scaled,
    leaf_seeds,
    with_float32_scales,
)
from fp8jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The hyperparameters. Without a learning rate the updates are Adam directions."""

    recipe: Recipe | None
    b1: Any
    b2: Any
    eps: Any
    learning_rate: Any = None
    weight_decay: Any = 0.0
    mask: Any = None
    decay: str = NO_DECAY
    zero: Zero | None = None
    seed: int = 0
    in_8_bits: bool = False


def scale_by_adam(
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    zero: Zero | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with the recipe's moments.

    Args:
        recipe: its `moments` are the formats of the moments (FP32+FP32, E4M3+FP16 or E5M2+FP16), and its
            `rounding` says how they are rounded. None means E4M3+FP16, rounded to nearest, see `adam`.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        zero: see `adam`.
        seed: see `adam`.

    Returns:
        A gradient transformation with an `AdamState` without master weights. Updates are float32, and zero
        in a skipped step.

    Raises:
        ValueError: the recipe has master weights, which only `adam` and `adamw` support; from `init`, the
            parameters need master weights, or their format is not the recipe's.
    """
    row = checks.recipe_of(recipe)
    if row is not None and row.master_weight != "-":
        raise ValueError(
            f"`recipe`: {row} keeps master weights, which are updated by `adam` and `adamw`; use one of them."
        )
    return _optimizer(_Rule(row, b1, b2, eps, zero=zero, seed=seed))


def adam(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    mask: Any = None,
    zero: Zero | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Adam. Weight decay, if any, is added to the gradient (L2), as in MS-AMP's `LBAdam`.

    Args:
        learning_rate: number or schedule.
        recipe: the model's recipe. With None the parameters' dtypes decide about master weights: FP8 weights
            get FP16 master weights, other weights none. The moments are then E4M3 + FP16, as in O2 and O3;
            dtypes cannot tell, because O1 and O2 have the same weights. For float32 moments pass "O1" with
            FP16 weights, or "te" with plain arrays.
        b1, b2, eps: as in `scale_by_adam`.
        weight_decay: strength of the L2 term.
        mask: which parameters decay: a tree of booleans, or a function from the parameters to such a tree
            (a `ScaledArray` counts as one leaf with the shape of its value).
        zero: the same `Zero` as in `value_and_grad`: how gradients, moments and master weights are sharded.
            `init` places the state with that sharding, and each device updates its shards. Without it any
            sharding works, and XLA partitions the step.
        seed: of the random bits, for a recipe that rounds stochastically. The bits depend on the seed, the
            step, the parameter's place among the parameters and the entry's place in it: not on the sharding.

    Returns:
        An optimizer with an `AdamState`; `update` needs the parameters. The updates of plain parameters are
        float32 arrays to add. With a recipe that rounds weights "stochastic" or "kahan", as `fp8`, the sum is
        exactly the new bfloat16 or float16 weight, and "kahan" stores what rounding took. The updates of
        `ScaledArray`s are their new values (`ReplaceUpdate`), which `fp8jax.apply_updates` writes. So
        transformations that change updates come before this optimizer.

    Raises:
        TypeError: `learning_rate` is a recipe.
        ValueError: a hyperparameter is NaN, infinite or negative, or a decay rate is 1 or more; `seed` has
            more than 32 bits; from `update`, `state` has the formats of another recipe, see `convert`; from
            `init`, the format of the parameters' `ScaledArray`s is not the recipe's.

    `init` warns of what rounding to nearest loses with these decay rates and this learning rate.
    """
    row = checks.recipe_of(recipe)
    return _optimizer(_Rule(row, b1, b2, eps, learning_rate, weight_decay, mask, L2, zero, seed))


def adamw(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    zero: Zero | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW: `optax.adamw` with the recipe's moments.

    The arguments are those of `adam`. Weight decay is decoupled: `learning_rate * weight_decay * w` is
    subtracted from the weight.

    Returns, raises: as in `adam`.
    """
    row = checks.recipe_of(recipe)
    return _optimizer(_Rule(row, b1, b2, eps, learning_rate, weight_decay, mask, DECOUPLED, zero, seed))


def adamw_8bit(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    zero: Zero | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with 8-bit moments and an absmax for each block of 256 entries: bitsandbytes' AdamW8bit.

    The moments take 2.03 bytes per parameter. Moments of arrays with fewer than 4096 entries stay float32; a
    stack of scanned layers is one array. Two differences from bitsandbytes' CUDA kernels: rounding is to the
    nearest code even if this changes the sign, and a step with inf or NaN is skipped, as in `adam`.

    The arguments are those of `adamw`. The recipe's `moments` column is ignored.

    Args:
        zero: None; a tensor's shards would have other blocks of 256 than the tensor.

    Returns: as in `adam`; `moments` returns trees of `Blockwise` moments and float32 arrays.

    Raises:
        ValueError: `zero` is given; otherwise as in `adam`.

    References:
        8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861; see `blockwise`.
    """
    checks.refuse_zero(zero, "adamw_8bit", "its blocks of 256 numbers are not those of a tensor's parts")
    row = checks.recipe_of(recipe)
    return _optimizer(_Rule(row, b1, b2, eps, learning_rate, weight_decay, mask, DECOUPLED, None, seed, True))


def _optimizer(rule: _Rule) -> optax.GradientTransformationExtraArgs:
    checks.check_rate(rule.learning_rate)
    checks.check_adam(rule.b1, rule.b2, rule.eps, rule.weight_decay, rule.seed)
    recipe = rule.recipe or Recipe.O3  # O3 has master weights for 8-bit weights only
    rounding = Rounding(*recipe.rounding[:2])

    def init(params: Any) -> AdamState:
        checks.check_weights(rule.recipe, params)
        if rule.learning_rate is None:
            checks.refuse_8_bits(params)
            checks.refuse_rounding(rule.recipe, params)
        leaves, treedef = jax.tree.flatten(without_variables(params), is_leaf=is_scaled)
        _decays(rule, treedef, treedef.unflatten(leaves))
        betas = (None, None) if rule.in_8_bits else (rule.b1, rule.b2)
        checks.warn_of_rounding(rule.recipe, params, rule.learning_rate, *betas)

        kept = first_state(params, recipe, rule.in_8_bits)
        checks.check_groups(rule.zero, kept[:2])
        if rule.zero is not None:
            kept = [rule.zero.place_state(tree, params) for tree in kept]
        mu, nu, master, remainder = (with_variables_inside(tree) for tree in kept)
        adam = optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)
        key = first_key(recipe, rule.seed)
        return AdamState(adam, master, jnp.zeros([], jnp.int32), remainder, key)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        if params is None and rule.learning_rate is not None:
            raise ValueError(
                "`params`: expected the parameters; got None. Call `update(grads, state, params)`."
            )
        checks.check_state(state, AdamState)
        # An `nnx.State` has an `nnx.Variable` around each leaf, and no key where there is none.
        boxes = updates, state.adam.mu, state.adam.nu, state.master, state.remainder
        updates, *kept = map(without_variables, boxes)
        check_tags(updates)
        params = without_variables(params)
        check_finite_scales(params)
        params = with_float32_scales(params)
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_scaled)
        count = jnp.asarray(optax.safe_increment(state.adam.count))
        rate: Any = (
            rule.learning_rate(state.adam.count) if callable(rule.learning_rate) else rule.learning_rate
        )
        scalars = AdamScalars(
            (rule.b1, rule.b2),
            (1 - rule.b1, 1 - rule.b2),
            (1 - jnp.float32(rule.b1) ** count, jnp.sqrt(1 - jnp.float32(rule.b2) ** count)),
            rule.eps,
            None if rate is None else -rate,
            rule.weight_decay,
        )
        scalars = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), scalars)
        nothing = [None] * len(grads)
        mu, nu, master, remainder = (
            nothing if tree is None else treedef.flatten_up_to(filled(tree, updates)) for tree in kept
        )
        olds = nothing if rule.learning_rate is None else treedef.flatten_up_to(params)
        seeds = None if state.key is None else leaf_seeds(state.key, count, len(grads))
        parts = zip(grads, mu, nu, olds, master, remainder, strict=True)
        leaves = [ParamState(*part) for part in parts]
        _check_shapes(leaves)
        checks.check_weights(rule.recipe, params)
        check_formats(leaves, state.key, rule.recipe, rule.in_8_bits)
        decays = _decays(rule, treedef, params)
        if rule.zero is None:
            step = functools.partial(fused_adam, decays=decays, rounding=rounding)
            new, ok = with_auto_axes(step, as_written, leaves, scalars, seeds)
        else:
            new, ok = advance_over_devices(rule.zero, leaves, scalars, seeds, decays, rounding)
        directions, mu, nu, master, remainder = (
            in_variables(box, treedef.unflatten([leaf[i] for leaf in new])) for i, box in enumerate(boxes)
        )
        adam = optax.ScaleByAdamState(jnp.where(ok, count, state.adam.count), mu, nu)
        skipped = state.skipped + jnp.where(ok, 0, 1)
        return directions, AdamState(adam, master, skipped, remainder, state.key)

    return takes_variables(optax.GradientTransformation(init, update))


def _check_shapes(leaves: list[ParamState]) -> None:
    for leaf in leaves:
        if leaf.grad.shape != leaf.mu.shape:
            raise ValueError(
                f"`updates`: expected gradients of the shapes that `init` saw, here {leaf.mu.shape}; got "
                f"{leaf.grad.shape}."
            )


def _decays(rule: _Rule, treedef: Any, params: Any) -> tuple[str, ...]:
    """The kind of weight decay of each leaf.

    Raises:
        ValueError: the mask is not a tree like the parameters.
    """
    if rule.learning_rate is None or rule.mask is None:
        return (rule.decay,) * treedef.num_leaves
    mask: Any = plain_mask(rule.mask)
    mask = mask(params) if callable(mask) else mask
    try:
        spread = jax.tree.map(
            lambda m, below: jax.tree.map(lambda _: m, below, is_leaf=is_scaled), mask, params
        )
        decays = treedef.flatten_up_to(spread)
    except (TypeError, ValueError):
        wanted, got = (
            "{" + ", ".join(map(repr, x)) + "}" if isinstance(x, Mapping) else type(x).__name__
            for x in (params, mask)
        )
        raise ValueError(
            "`mask`: expected a tree of booleans like the parameters, or a function from the parameters to "
            f"one; got {got} for parameters {wanted}."
        ) from None
    return tuple(rule.decay if decay else NO_DECAY for decay in decays)
