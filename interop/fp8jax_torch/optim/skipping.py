"""Optimizers of torch and others: a step along a gradient that is not finite changes nothing and is counted.

    optimizer = skipping(torch.optim.AdamW(model.parameters()))
    optimizer.step()
    optimizer.skipped

`fp8jax_torch.optim.Adam` and `AdamW` do this by themselves.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp8jax_torch.mixins import Mixin, mixed
from fp8jax_torch.optim.adam import Adam, amax_of
from fp8jax_torch.scaled import is_scaled


class _NotFinite(Exception):
    """Ends a step before it changes anything."""


class Skipping(Mixin):
    """Mixin of an optimizer.

    Attributes:
        skipped: steps not taken because a gradient was not finite.
        has_skipped: whether the last one was not.
    """

    skipped = 0
    has_skipped = False

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, or none if a gradient is not finite; hooks are then not called."""
        parent: Any = super()
        if isinstance(self, Adam):
            return parent.step(closure)
        loss: Any = None

        def check() -> None:
            grads = (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            if not _are_finite(grads):
                raise _NotFinite

        def checked() -> Any:
            nonlocal loss
            assert closure is not None
            loss = closure()
            check()
            return loss

        self.has_skipped = False
        try:
            if closure is not None:
                return parent.step(checked, *args, **kwargs)
            check()
            return parent.step(*args, **kwargs)
        except _NotFinite:
            self.skipped, self.has_skipped = self.skipped + 1, True
            self.on_skip()
            return loss

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]  # torch calls hooks in the step within

    def on_skip(self) -> None:
        """What is done instead of a step."""

    def state_dict(self: Any) -> dict[str, Any]:
        """As torch's, and "skipped"."""
        return {**super().state_dict(), "skipped": self.skipped}  # pyright: ignore

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As torch's; of a state without "skipped" too."""
        super().load_state_dict(state_dict)  # pyright: ignore
        self.skipped = state_dict.get("skipped", 0)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped": self.skipped}  # pyright: ignore


def skipping(optimizer: Any, mixin: type[Skipping] = Skipping) -> Any:
    """The optimizer, which from now on skips; its class is one of the mixin and its own."""
    if isinstance(optimizer, mixin):
        return optimizer
    optimizer.__class__ = mixed(mixin, type(optimizer))
    if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        # A scheduler has put a function there that knows the step of the class before.
        optimizer.step = _step_of_class(weakref.ref(optimizer))
    return optimizer


def _step_of_class(optimizer: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        self = optimizer()
        self._opt_called = True
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    return step


def _are_finite(grads: Iterable[torch.Tensor]) -> bool:
    by_device: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).extend(end.isfinite() for end in _ends(grad))
    return all(torch.stack(found).all().item() for found in by_device.values() if found)


def _ends(grad: Any) -> tuple[torch.Tensor, ...]:
    """Numbers that are finite if all of the gradient's are."""
    if is_scaled(grad):
        return (amax_of(grad),)
    numbers = grad.detach()
    numbers = numbers._values() if numbers.is_sparse else numbers
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    return tuple(torch.aminmax(numbers)) if numbers.numel() else ()
