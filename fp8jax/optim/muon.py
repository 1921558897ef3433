"""Muon with momentum in one byte.

The momentum of each weight matrix is orthogonalized by a Newton-Schulz iteration; all other parameters are
updated by Adam. Muon has no second moment: the recipe `fp8` stores a weight, its gradient and its momentum in
5.01 bytes.

The momentum is stored as `LinearInt8`, not in FP8: Newton-Schulz amplifies small singular values, which
rounding relative to each entry fills with noise.
"""

import dataclasses
from typing import Any

import optax

from fp8jax.comm import Zero
from fp8jax.optim import checks
from fp8jax.optim.muon_matrices import Muon
from fp8jax.optim.optimizer import UpdateRule, optimizer
from fp8jax.optim.step import DECOUPLED
from fp8jax.recipe import Recipe


def muon(
    learning_rate: Any,
    recipe: Recipe | str | None = None,
    beta: Any = 0.95,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    adam_learning_rate: Any = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_weight_decay: Any = 0.0,
    eps: Any = 1e-8,
    weight_dimension_numbers: Any = None,
    consistent_rms: Any = None,
    zero: Zero | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon` with the recipe's weights and momentum.

    Momentum is Nesterov's, also Adam's for the other parameters, with optax's corrections for the first
    steps. It is orthogonalized by optax's five Newton-Schulz steps in bfloat16, as in Muon's reference.

    Args:
        learning_rate: of matrices, a number or a schedule.
        recipe: as in `adam`. The momentum of matrices is `LinearInt8`, rounded as the recipe's first moments;
            float32 for a recipe with float32 moments.
        beta: decay rate of the momentum.
        weight_decay: of matrices, decoupled, times the learning rate.
        mask: which parameters decay, as in `adam`.
        adam_learning_rate: of all other parameters; None for `learning_rate`.
        adam_b1, adam_b2, adam_weight_decay, eps: of all other parameters, as in `adamw`.
        weight_dimension_numbers: a tree like the parameters of `optax.contrib.MuonDimensionNumbers`, and None
            for parameters that Adam updates; or a function from the parameters to such a tree (a
            `ScaledArray` counts as one leaf). All other axes of a parameter are those of a stack of matrices.
            None takes as matrices (input, output) plain arrays of two dimensions, and `ScaledArray`s of two,
            or stacked with a scale for each matrix. That includes embeddings and heads, as in optax, but not
            arrays called "bias" or "scale", which scanned layers stack. Plain arrays of more dimensions are
            not matrices without dimension numbers; `init` warns if they are called "kernel".
        consistent_rms: scales updates by this times the root of max(fan-in, fan-out); 0.2 matches Adam's.
            None scales them by the root of fan-out / fan-in, if that is more than 1.
        zero: as in `adam`, without `offload`. Each device orthogonalizes with the help of the others, as XLA
            partitions it.
        seed: as in `adam`.

    Returns:
        An optimizer as from `adamw`. Its `AdamState` has no second moments for matrices.

    Raises:
        TypeError, ValueError: as in `adam`; `weight_dimension_numbers` do not fit the parameters; or `zero`
            offloads.

    References:
        Jordan, Muon: an optimizer for hidden layers in neural networks, 2024; `consistent_rms`: arXiv
        2502.16982, section 2.2; 8-bit momentum in linear codes: arXiv 2509.23106.
    """
    row = checks.recipe_of(recipe)
    checks.check_rate(learning_rate)
    checks.check_number("beta", beta, below=1)
    checks.check_number("weight_decay", weight_decay)
    if consistent_rms is not None:
        checks.check_number("consistent_rms", consistent_rms)
    if zero is not None and zero.offload:
        raise ValueError("`zero`: expected one without `offload` for muon; got offload=True.")
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    matrices = Muon(learning_rate, beta, weight_decay, weight_dimension_numbers, consistent_rms)
    rule = UpdateRule(row, adam_b1, adam_b2, eps, rate, adam_weight_decay, mask, DECOUPLED, zero, seed)
    return optimizer(dataclasses.replace(rule, muon=matrices))
