"""The optimizer of a `TrainConfig`: a schedule, clipping, and one of fp8jax's."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import optax

from fp8jax import optim
from fp8jax.optim.checks import refuse_masters
from fp8jax.recipe import Recipe
from fp8jax.train.settings import TrainConfig


def schedule_of(config: TrainConfig) -> optax.Schedule:
    """A linear rise over `warmup_steps`, then `lr_scheduler_type` until `max_steps`."""
    rate, falling = config.learning_rate, config.max_steps - config.warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(rate),
        "linear": lambda: optax.linear_schedule(rate, 0.0, falling),
        "cosine": lambda: optax.cosine_decay_schedule(rate, falling),
    }[config.lr_scheduler_type]()
    if not config.warmup_steps:
        return after
    rising = optax.linear_schedule(rate / (config.warmup_steps + 1), rate, config.warmup_steps)
    return optax.join_schedules([rising, after], [config.warmup_steps])


def optimizer_of(config: TrainConfig, zero: Any = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer that a config names.

    Args:
        config: its settings under "optimizer", and its recipe.
        zero: as in `fp8jax.optim.adamw`.
    """
    return clipped(
        config.optimizer,
        schedule_of(config),
        config.precision,
        (config.adam_beta1, config.adam_beta2, config.adam_epsilon),
        weight_decay=config.weight_decay,
        mask=decays,
        max_norm=config.max_grad_norm,
        zero=zero,
    )


def clipped(
    name: str,
    rate: optax.Schedule,
    recipe: Recipe,
    betas: Sequence[float],
    *,
    weight_decay: float,
    mask: Any,
    max_norm: float,
    zero: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer by name, after clipping.

    Args:
        name: adamw, adamw_8bit or adafactor. Its rate is the schedule's, as Transformers has it, not one
            of the weights' size.
        rate: learning rate by step.
        recipe: gives the moments of adamw, and the master weights.
        betas: both of Adam's, and epsilon if it is not the default one; not for adafactor.
        weight_decay: decoupled, times the rate.
        mask: of it, as in optax.
        max_norm: of the gradient; 0 is no limit.
        zero: as in `fp8jax.optim.adamw`; only for it.

    Raises:
        ValueError: adafactor for a recipe with master weights.
    """
    clip = optim.clip_by_global_norm(max_norm or math.inf)
    if name == "adafactor":
        refuse_masters(recipe)
        return optax.chain(clip, optim.with_dequantized(_adafactor(rate, weight_decay, mask)))
    make = {"adamw": optim.adamw, "adamw_8bit": optim.adamw_8bit}[name]
    spread = {"zero": zero} if name == "adamw" else {}
    return optax.chain(clip, make(rate, recipe, *betas, weight_decay=weight_decay, mask=mask, **spread))


def _adafactor(rate: optax.Schedule, weight_decay: float, mask: Any) -> optax.GradientTransformation:
    """Decoupled decay is inside of the rate, as in AdamW; optax's own option has it outside.

    Updates are not clipped once more, each tensor's for itself (section 6 of the paper): rows and columns
    give a tensor updates of a root mean square around 1, where that begins, so it would shorten many steps.
    """
    return optax.chain(
        optax.adafactor(None, multiply_by_parameter_scale=False, clipping_threshold=None),
        optax.add_decayed_weights(-weight_decay, mask),
        optax.scale_by_learning_rate(rate, flip_sign=False),
    )


def decays(params: Any) -> Any:
    """Which parameters decay: what is named as a weight of a product or a table, not norms and biases."""

    def is_matrix(path: Any, leaf: Any) -> bool:
        last = path[-1]
        name = str(getattr(last, "key", getattr(last, "name", last)))
        return leaf.ndim >= 2 and name not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
