"""Writes to parameters: whether one was written since, and how the optimizer that moved it rounds.

before = version(parameter)
version(parameter) != before          # after a write, also one by no optimizer
parameter.moved_by                    # after a step of any optimizer: its `master_weight` and `rounding`
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8jax_torch.scaled import is_scaled

Version = tuple[tuple[int, int], int]


def version_of(parameter: Any) -> Version:
    """Changes with each write: the first part for the array or codes, the second for the scale."""
    if not is_scaled(parameter):
        return (id(parameter), _count(parameter)), 0
    return (id(parameter.codes), _count(parameter.codes)), _count(parameter.scale)


def _count(x: torch.Tensor) -> int:
    """How often a plain tensor was written; -1 for a tensor of inference mode, which does not count."""
    return -1 if x.is_inference() else x._version


def version_and_scale(parameter: Any) -> tuple[Version, torch.Tensor | None]:
    """The version of a parameter, and a copy of its scale."""
    return version_of(parameter), parameter.scale.detach().clone() if is_scaled(parameter) else None


def _note_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """After a step of any optimizer: notes how it rounds scaled weights, which their layers check.

    An optimizer with masters or another rounding has a method `rounds`.
    """
    rounds = getattr(optimizer, "rounds", lambda parameter: ("-", "nearest"))
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if is_scaled(parameter) and parameter.grad is not None:
            parameter.moved_by = rounds(parameter)


# For all optimizers, since a model after `transform` knows none.
register_optimizer_step_post_hook(_note_step)
