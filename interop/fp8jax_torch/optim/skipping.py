"""Any torch optimizer, skipping and counting steps with a gradient that is not finite.

    optimizer = skipping(torch.optim.AdamW(model.parameters()))
    optimizer.step()
    optimizer.skipped

`fp8jax_torch.optim.Adam` and `AdamW` do so without it.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

from fp8jax_torch.mixins import Mixin, mixed
from fp8jax_torch.optim.adam import Adam
from fp8jax_torch.optim.finite import largest


class _NotFinite(Exception):
    """Ends a step before it changes anything."""


class Skipping(Mixin):
    """Mixin of an optimizer.

    Attributes:
        skipped: steps not taken because a gradient was not finite.
        has_skipped: whether the last step was skipped.
    """

    skipped = 0
    has_skipped = False

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step; without a step and its hooks where a gradient is not finite."""
        parent: Any = super()
        if isinstance(self, Adam):
            return parent.step(closure)
        loss: Any = None

        def check() -> None:
            grads = (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            if not math.isfinite(largest(grads)):
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
        """Runs in place of a skipped step."""

    def state_dict(self: Any) -> dict[str, Any]:
        """As torch's, and "skipped"."""
        return {**super().state_dict(), "skipped": self.skipped}  # pyright: ignore

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As torch's; a state without "skipped" is legal, too."""
        super().load_state_dict(state_dict)  # pyright: ignore
        self.skipped = state_dict.get("skipped", 0)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped": self.skipped}  # pyright: ignore


def skipping(optimizer: Any, mixin: type[Skipping] = Skipping) -> Any:
    """Makes an optimizer skip: its class becomes a class of the mixin and its own."""
    if isinstance(optimizer, mixin):
        return optimizer
    optimizer.__class__ = mixed(mixin, type(optimizer))
    if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        # A scheduler replaced `step` by a function of the former class's step.
        optimizer.step = _step_of_class(weakref.ref(optimizer))
    return optimizer


def _step_of_class(optimizer: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        self = optimizer()
        self._opt_called = True
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    return step
