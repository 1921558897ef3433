"""The optimizer of a `TrainConfig`: a learning rate schedule, gradient clipping, and the optimizer itself."""

import math
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from fp8jax import optim
from fp8jax.train.config import TrainConfig


def schedule_of(config: TrainConfig) -> optax.Schedule:
    """The learning rate by step: a linear warm-up, then `lr_scheduler_type` until `max_steps`."""
    rate, warmup = config.learning_rate, config.warmup_steps
    rising = optax.linear_schedule(rate / (warmup + 1), rate, warmup)
    steps, least = config.max_steps - warmup, config.min_learning_rate
    falling = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, least, steps),
        "cosine": optax.cosine_decay_schedule(rate, steps, alpha=least / (rate or 1)),
    }[config.lr_scheduler_type]
    return optax.join_schedules([rising, falling], [warmup]) if warmup else falling


def optimizer_of(config: TrainConfig, zero: Any = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a configuration, after clipping.

    Args:
        config: its options of the optimizer, and its recipe.
        zero: as in `fp8jax.optim.adamw`.
    """
    recipe, rate = config.precision, schedule_of(config)
    seed = config.seed
    clip = optim.clip_by_global_norm(config.max_grad_norm or math.inf)
    decay: dict[str, Any] = {"weight_decay": config.weight_decay, "mask": decays}
    if config.optimizer == "adafactor":
        return optax.chain(clip, optim.with_dequantized(_adafactor(rate, **decay), recipe, seed=seed))
    betas = config.adam_beta1, config.adam_beta2, config.adam_epsilon
    options = {**decay, "seed": seed}
    if config.optimizer == "adamw_8bit":
        return optax.chain(clip, optim.adamw_8bit(rate, recipe, *betas, **options))
    return optax.chain(clip, optim.adamw(rate, recipe, *betas, **options, zero=zero))


def _adafactor(rate: optax.Schedule, weight_decay: float, mask: Any) -> optax.GradientTransformation:
    """Adafactor with Transformers' learning rate, which is not relative to the size of the weights.

    The decoupled weight decay is multiplied by the rate, as in AdamW; with optax's own option it is not.
    Updates are not clipped a second time, tensor by tensor (section 6 of arXiv:1804.04235): factored moments
    give updates of a root mean square around 1, where that clipping begins, so it would shorten many steps.
    """
    return optax.chain(
        optax.adafactor(None, multiply_by_parameter_scale=False, clipping_threshold=None),
        optax.add_decayed_weights(-weight_decay, mask),
        optax.scale_by_learning_rate(rate, flip_sign=False),
    )


def decays(params: PyTree) -> Any:
    """Which parameters have weight decay: kernels and embeddings, not norms and biases."""

    def is_matrix(path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf.ndim >= 2 and name not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
