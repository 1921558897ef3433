"""`skipping`: makes any torch optimizer skip and count steps with a gradient that is not finite."""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from fp8jax_torch import casts
from fp8jax_torch.mixins import mixed
from fp8jax_torch.optim.step import AdamScalars, ParamState, amaxes_of_step
from fp8jax_torch.processes import are_several, largest_of_all
from fp8jax_torch.scaled import is_scaled, value

# Gradients below this limit, squared, are far from float32's max.
_SAFE = 2.0**60
# Entries of states of `fp8jax_torch.optim`.
_SCALES = {"exp_avg_scale", "exp_avg_sq_scale", "exp_avg_sq_root_scale", "master_scale"}


class _NotFinite(Exception):
    """Ends a step before it changes anything; its argument is the loss."""


class Skipping:
    """Mixin of an optimizer that counts skipped steps. All processes skip a step if one of them does."""

    skipped = 0  # number of skipped steps
    has_skipped = False  # whether the last step was skipped
    process_group: Any = None  # the processes that step together; None for all; a copy has None

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; no step and no step hooks where a gradient is not finite.

        The optimizer's state stays plain, also where it was a copy of a quantized gradient.
        """
        parent: Any = super()

        def check(loss: Any = None) -> Any:
            grads = (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            if not self.agrees(math.isfinite(largest(grads))):
                raise _NotFinite(loss)
            return loss

        self.has_skipped = False
        try:
            if closure is not None:
                args = (lambda: check(closure()), *args)
            else:
                check()
            loss = parent.step(*args, **kwargs)
        except _NotFinite as error:
            self.skipped, self.has_skipped = self.skipped + 1, True
            return error.args[0]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state.get(parameter, {})
            # torch's SGD begins its momentum as a clone of the gradient.
            state |= {name: value(entry) for name, entry in state.items() if is_scaled(entry)}
        return loss

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]  # the optimizer's step calls the hooks

    def agrees(self: Any, is_finite: bool) -> bool:
        """Whether the gradients of all processes are finite; in FSDP each has other shards of them."""
        if not are_several(self.process_group):
            return is_finite
        device = next(parameter.device for group in self.param_groups for parameter in group["params"])
        flag = torch.tensor(float(not is_finite), device=device)
        return not largest_of_all(flag, self.process_group).item()

    def state_dict(self: Any) -> dict[str, Any]:
        """As torch's, and "skipped"."""
        return {**super().state_dict(), "skipped": self.skipped}  # pyright: ignore

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As torch's; "skipped" may be missing.

        Raises:
            ValueError: the state has codes and scales, as the optimizer of another recipe stores its moments.
        """
        names = {name for state in state_dict["state"].values() for name in state}
        if scales := sorted(names & _SCALES):
            raise ValueError(
                f"`state_dict`: expected the state of an optimizer of torch; got {', '.join(scales)}, which "
                "fp8jax_torch.optim stores with another recipe. Load it into an optimizer of that recipe."
            )
        super().load_state_dict(state_dict)  # pyright: ignore
        self.skipped = state_dict.get("skipped", 0)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped": self.skipped}  # pyright: ignore


def skipping(optimizer: Any, mixin: type[Skipping] = Skipping) -> Any:
    """Makes any torch optimizer skip steps with a gradient that is not finite, and returns it.

        optimizer = skipping(torch.optim.AdamW(model.parameters()))
        optimizer.step()
        optimizer.skipped

    Its class becomes a subclass of the mixin and its old class. `fp8jax_torch.optim`'s skip without this.
    """
    if isinstance(optimizer, mixin):
        return optimizer
    optimizer.__class__ = mixed(mixin, type(optimizer))
    if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        # A scheduler replaced `step` by a function that calls the old class's step.
        optimizer.step = _step_of_class(weakref.ref(optimizer))
    return optimizer


def _step_of_class(optimizer: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        self = optimizer()
        self._opt_called = True
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    return step


def largest(grads: Iterable[torch.Tensor]) -> float:
    """The largest magnitude in gradients, plain, sparse, complex or scaled; inf or NaN if not finite."""
    numbers = [_numbers(grad) for grad in grads]
    return get_total_norm([x for x in numbers if x.numel()], math.inf).item()


def _numbers(grad: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient; of a scaled gradient only the largest magnitude."""
    if is_scaled(grad):
        return casts.amax(casts.to_float(grad.codes)) * grad.scale
    dense = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(dense) if dense.is_complex() else dense


def stays_finite(parameters: list[tuple[Any, ParamState, AdamScalars]]) -> bool:
    """Whether no parameter's step makes a number infinite or NaN."""
    worst = largest(state.grad for _, state, _ in parameters)
    if not math.isfinite(worst):
        return False
    is_tame = all(max(s.lr, s.weight_decay) < _SAFE and s.eps > 1 / _SAFE for _, _, s in parameters)
    if worst < _SAFE and is_tame:
        return True
    return all(amaxes_of_step(state, scalars).isfinite().all() for _, state, scalars in parameters)
