"""The scaling state of one layer, as in `fp8jax.scaling`, for the three operands of a dot product.

It is a submodule named `fp8` of each FP8 layer, and so a part of `state_dict`. A backward pass records
amaxes; microbatches, several uses of a layer and recomputed activations merge by their maximum. `advance`
moves the amaxes into the window once per optimizer step.
"""

from typing import Any

import torch

from fp8jax.quantization import FIRST_SCALES, UNSET
from fp8jax.recipe import Recipe
from fp8jax_torch import casts

LHS, RHS, GRAD = range(3)


class ScalingState(torch.nn.Module):
    """Scaling state of the operands input, weight and output gradient, in this order.

    Buffers, of delayed scaling only:
        scale: shape=(3,), float32: for the next cast.
        amax_history: shape=(3, amax_history_len), float32: newest first, 0 without an amax.
        step: shape=(), float32: steps modulo interval; only where interval > 1.
        seen: shape=(3,), float32: largest usable amaxes since the last `advance`; not saved.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor
    step: torch.Tensor
    seen: torch.Tensor

    def __init__(self, recipe: Recipe, device: Any = None):
        super().__init__()
        self.recipe = recipe
        self.is_due = False
        if recipe.scaling != "delayed":
            return
        self.register_buffer("scale", torch.tensor(FIRST_SCALES[recipe.first_scale], device=device))
        self.register_buffer("amax_history", torch.zeros(3, recipe.amax_history_len, device=device))
        if recipe.interval > 1:
            self.register_buffer("step", torch.zeros((), device=device))
        self.register_buffer("seen", torch.zeros(3, device=device), persistent=False)

    def scale_for(self, operand: int, amax: torch.Tensor, limit: float) -> torch.Tensor:
        """The scale of an operand's cast in this step; its amax is float32, shape=()."""
        margin = self.recipe.margin
        if self.recipe.scaling != "delayed":
            return casts.scale_of(amax, limit, margin=margin)
        kept = self.scale[operand].clone()
        if self.recipe.first_scale != "tensor":
            return kept
        return torch.where(kept == UNSET, casts.scale_of(amax, limit, margin=margin), kept)

    def see(self, amaxes: list[torch.Tensor]) -> None:
        """Records the amaxes of one dot product."""
        if self.recipe.scaling == "delayed":
            new = torch.stack(amaxes)
            self.seen.copy_(torch.maximum(self.seen, torch.where(casts.usable(new), new, 0.0)))
            self.is_due = True

    @torch.no_grad()
    def advance(self) -> None:
        """Moves the recorded amaxes into the window, and sets the scales of the next step."""
        if not self.is_due:
            return
        recipe = self.recipe
        history = torch.cat([self.seen[:, None], self.amax_history[:, :-1]], 1)
        window = self.seen if recipe.amax_compute_algo == "most_recent" else history.amax(1)
        limits = torch.tensor([format.max for format in operand_formats(recipe)], device=self.seen.device)
        scale = casts.scale_of(window, limits, margin=recipe.margin, otherwise=self.scale)
        if recipe.interval > 1:
            is_due = self.step == 0
            if recipe.first_scale != "one":  # an operand without a scale of its own does not wait
                is_due = is_due | (self.amax_history.amax(1) == 0)
            scale = torch.where(is_due, scale, self.scale)
            self.step.copy_((self.step + 1) % recipe.interval)
        self.scale.copy_(scale)
        self.amax_history.copy_(history)
        self.forget()

    def forget(self) -> None:
        """Drops the recorded amaxes: a skipped step leaves the state unchanged."""
        if self.is_due:
            self.seen.zero_()
            self.is_due = False

    def _apply(self, fn: Any, recurse: bool = True) -> "ScalingState":
        """A move to a device; the state stays float32 when the model is cast."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, new in self._buffers.items():
            if new is not None and new.dtype != torch.float32:
                self._buffers[name] = kept[name].to(new.device)  # pyright: ignore[reportOptionalMemberAccess]
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:  # pyright: ignore
        """Accepts a checkpoint of the plain model, without scaling state; the state then stays unchanged."""
        metadata, strict, missing_keys, *errors = args
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *errors)
        if any(name.startswith(prefix) for name in state_dict):
            missing_keys += missing


def operand_formats(recipe: Recipe) -> list[Any]:
    """The formats of input, weight and output gradient."""
    forward, backward = map(casts.formats.get, recipe.gemm_formats)
    return [forward, forward, backward]
