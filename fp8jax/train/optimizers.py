"""The optimizer of a `TrainConfig`: a schedule, clipping, and one of fp8jax's."""

import math
from typing import Any

import jax
import optax

from fp8jax import optim
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
    rate, recipe = schedule_of(config), config.precision
    if config.optimizer == "adafactor":
        # As Transformers has it: the rate is that of the schedule, not of the weights' size.
        tx = optim.adafactor(rate, recipe, multiply_by_parameter_scale=False)
    else:
        make, spread = optim.adamw, {"zero": zero}
        if config.optimizer == "adamw_8bit":
            make, spread = optim.adamw_8bit, {}
        betas = config.adam_beta1, config.adam_beta2, config.adam_epsilon
        tx = make(rate, recipe, *betas, weight_decay=config.weight_decay, mask=decays, **spread)
    return optax.chain(optim.clip_by_global_norm(config.max_grad_norm or math.inf), tx)


def decays(params: Any) -> Any:
    """Which parameters decay: what is named as a weight of a product or a table, not norms and biases."""

    def is_matrix(path: Any, leaf: Any) -> bool:
        last = path[-1]
        name = str(getattr(last, "key", getattr(last, "name", last)))
        return leaf.ndim >= 2 and name not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
