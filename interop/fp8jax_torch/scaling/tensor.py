"""Scaling by tensor: one scale for a tensor, and the same codes for both GEMMs.

The scale of `CurrentScaling` is computed from the tensor to cast, the scale of `DelayedScaling` from the
amaxes of previous steps; see `fp8jax.scaling.delayed`.
"""

import math
from typing import Any

import torch
from jaxtyping import Float

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.quantization import FIRST_SCALES, UNSET
from fp8jax.scaling import GRAD, LHS, RHS
from fp8jax_torch import casts
from fp8jax_torch.gemm import Operand
from fp8jax_torch.scaling.base import Copies, Scaling, Uses


class CurrentScaling(Scaling):
    """Scales from the tensor to cast."""

    weight_dtype = torch.float8_e4m3fn

    def format(self, operand: int) -> Format:
        """The format of an operand's codes."""
        return formats.get(self.recipe.gemm_formats[operand == GRAD])

    def scale(self, state: Any, operand: int, amax: Float[torch.Tensor, ""]) -> Float[torch.Tensor, ""]:
        """The scale of an operand's cast in this step."""
        return casts.scale_of(amax, self.format(operand).max, margin=self.recipe.margin)

    def amax(self, x: Operand) -> Float[torch.Tensor, ""]:
        """The amax of codes is the largest possible one."""
        return casts.amax(x.data) if x.scale is None else x.scale * self.format(RHS).max

    def quantize(self, state: Any, operand: int, x: Operand, amax: Any, uses: Uses) -> Copies:
        """See `Scaling`."""
        if x.scale is None and any(uses):
            scale = self.scale(state, operand, amax)
            codes = casts.cast(x.data.float() * (1 / scale), self.format(operand))
            if operand == GRAD:
                # Saturated, an infinite gradient would look like a large one: NaN reaches both others.
                scale = torch.where(amax < math.inf, scale, math.nan)
            x = Operand(codes, scale)
        return [x if is_used else None for is_used in uses]


class DelayedScaling(CurrentScaling):
    """Scales from the amaxes of previous steps.

    Buffers of the state:
        scale: shape=(3,), float32: for the next cast.
        amax_history: shape=(3, amax_history_len), float32: newest first, 0 without an amax.
        step: shape=(), float32: steps modulo interval; only where interval > 1.
    """

    def init(self, path: str) -> dict[str, torch.Tensor]:
        """See `Scaling`."""
        scale = torch.tensor(FIRST_SCALES[self.recipe.first_scale], dtype=torch.float32)
        first = {"scale": scale, "amax_history": scale.new_zeros(3, self.recipe.amax_history_len)}
        return first | ({"step": scale.new_zeros(())} if self.recipe.interval > 1 else {})

    def scale(self, state: Any, operand: int, amax: Float[torch.Tensor, ""]) -> Float[torch.Tensor, ""]:
        """See `CurrentScaling`; raises TypeError for scales that are not float32."""
        if state.scale.dtype != torch.float32:
            raise TypeError(
                f"`{state.path}`: expected float32 scales; got {str(state.scale.dtype)[6:]}, as by FSDP's "
                "MixedPrecision(buffer_dtype=...). Leave buffer_dtype out."
            )
        scale = state.scale[operand].clone()
        if self.recipe.first_scale != "tensor":
            return scale
        return torch.where(scale == UNSET, super().scale(state, operand, amax), scale)

    def convert(self, state: Any, saved: Any, prefix: str) -> None:
        """Sets the scales by the amaxes: the maxima of the saved scales' formats may be other ones.

        With interval > 1 the scales stay, since they may be older than the amaxes.
        """
        scale, history = (saved.get(prefix + name) for name in ("scale", "amax_history"))
        if self.recipe.interval > 1 or scale is None or history is None:
            return
        if (scale.shape, history.shape) == (state.scale.shape, state.amax_history.shape):
            saved[f"{prefix}scale"] = self._scale_of(history.float(), scale.to(history.device))

    def _scale_of(self, history: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """The scales by the history of amaxes; `otherwise` where it has none."""
        amaxes = history[:, 0] if self.recipe.amax_compute_algo == "most_recent" else history.amax(1)
        limits = [self.format(operand).max for operand in (LHS, RHS, GRAD)]
        limits = torch.tensor(limits, device=amaxes.device)
        return casts.scale_of(amaxes, limits, margin=self.recipe.margin, otherwise=otherwise)

    def update(self, state: Any) -> None:
        """Moves the recorded amaxes into the history, and sets the scales of the next step."""
        recipe, recorded = self.recipe, state.recorded.to(state.scale.device)
        history = torch.cat([recorded[:, None], state.amax_history[:, :-1]], 1)
        scale = self._scale_of(history, state.scale)
        if recipe.interval > 1:
            is_due = state.step == 0
            if recipe.first_scale != "one":  # the first scale of an operand does not wait
                is_due = is_due | (state.amax_history.amax(1) == 0)
            scale = torch.where(is_due, scale, state.scale)
            state.step.copy_((state.step + 1) % recipe.interval)
        state.scale.copy_(scale)
        state.amax_history.copy_(history)
