"""Adam with moments in the formats of the recipe's `moments` column.

A step computes in float32, for each tensor:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    direction = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)

The direction uses m and v before they are rounded. Then m and v are rounded to their formats, each tensor on
a new power-of-two scale. E4M3 + FP16 moments take 3 bytes per parameter instead of 8.

On a GPU a step is computed twice (`step.fused`), so that no float32 copy of a tensor is stored.

A step that would make any weight or moment infinite or NaN is skipped and counted. For this check a GPU reads
only the gradients if weights (up to 1e30) and moments are float32 and were finite before.

References:
    Adam, arXiv 1412.6980; AdamW, arXiv 1711.05101.
    FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP `LBAdam`, `LBAdamW`.
"""

from typing import Any

import optax

from fp8jax.comm import Zero
from fp8jax.optim import checks
from fp8jax.optim.optimizer import UpdateRule, optimizer
from fp8jax.optim.step import DECOUPLED, L2
from fp8jax.recipe import Recipe


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
        recipe: its `moments` are the formats of the moments (FP32+FP32, E4M3+FP16, E5M2+FP16 or E5M2+E4M4),
            and its `rounding` says how they are rounded. None means E4M3+FP16, rounded to nearest, see
            `adam`.
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
            parameters are complex or need master weights, their format is not the recipe's, or the recipe
            rounds such weights otherwise than to nearest, as `fp8` does.
    """
    row = checks.recipe_of(recipe)
    if row is not None and row.master_weight != "-":
        raise ValueError(
            f"`recipe`: {row} keeps master weights, which are updated by `adam` and `adamw`; use one of them."
        )
    return optimizer(UpdateRule(row, b1, b2, eps, zero=zero, seed=seed))


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
            (a `ScaledArray` counts as one leaf with the shape of its value). `optax.inject_hyperparams` needs
            `static_args=("recipe", "mask")` for a function.
        zero: the same `Zero` as in `value_and_grad`: how gradients, moments and master weights are sharded.
            `init` places the state with that sharding, and each device updates its shards. Without it any
            sharding works under `jax.jit`, where XLA partitions the step. In a `jax.shard_map` of yours give
            it whole gradients: with shards, each device would decide alone whether to skip a step.
        seed: of the random bits, for a recipe that rounds stochastically. The bits depend on the seed, the
            step, the parameter's place among the parameters and the entry's place in it: not on the sharding.

    Returns:
        An optimizer with an `AdamState`; `update` needs the parameters. The updates of plain parameters are
        float32 arrays to add. With a recipe that rounds weights "stochastic" or "kahan", as `fp8`, the sum is
        exactly the new bfloat16 or float16 weight, and "kahan" stores what rounding took. The updates of
        `ScaledArray`s are their new values (`ReplaceUpdate`), which `fp8jax.apply_updates` writes. So
        transformations that change updates come before this optimizer.

    Raises:
        TypeError: `learning_rate` is a recipe, or a hyperparameter is no number; from `update`, `state` is
            not this optimizer's, or arithmetic changed an FP8 gradient (compiled code cannot raise).
        ValueError: a hyperparameter is NaN, infinite or negative, or a decay rate is 1 or more; `seed` has
            more than 32 bits; from `update`, `state` has the formats of another recipe, see `convert`, or
            was made for other parameters; from `init`, the format of the parameters' `ScaledArray`s is not
            the recipe's, `mask` is not a tree of booleans like the parameters, or parameters are complex:
            `optax.contrib.split_real_and_imaginary` takes these.

    `init` warns of what rounding to nearest loses with these decay rates and this learning rate.
    """
    row = checks.recipe_of(recipe)
    return optimizer(UpdateRule(row, b1, b2, eps, learning_rate, weight_decay, mask, L2, zero, seed))


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
    return optimizer(UpdateRule(row, b1, b2, eps, learning_rate, weight_decay, mask, DECOUPLED, zero, seed))


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
    return optimizer(
        UpdateRule(row, b1, b2, eps, learning_rate, weight_decay, mask, DECOUPLED, None, seed, True)
    )
