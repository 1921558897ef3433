"""The scaling state of one layer, as in `fp8jax.scaling`, for input, weight and output gradient.

It is a submodule named `fp8` of each FP8 layer, and so a part of `state_dict`. A backward pass records
amaxes; microbatches, several uses of a layer, recomputed activations and processes merge by their maximum.
`advance` moves the amaxes into the history once per optimizer step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.quantization import FIRST_SCALES, UNSET
from fp8jax.recipe import Recipe
from fp8jax.scaling import block, of_recipe
from fp8jax_torch import casts
from fp8jax_torch.processes import are_several, largest_of_all

LHS, RHS, GRAD = range(3)


class ScalingState(torch.nn.Module):
    """Scaling state of the operands input, weight and output gradient, in this order.

    Buffers, of nvfp4 with stochastic rounding:
        key: shape=(2,), float32: a seed, and the number of steps; see `fp8jax.scaling.block`.

    Buffers, of delayed scaling:
        scale: shape=(3,), float32: for the next cast.
        amax_history: shape=(3, amax_history_len), float32: newest first, 0 without an amax.
        step: shape=(), float32: steps modulo interval; only where interval > 1.

    Attributes:
        path: the layer's path.
        recorded: shape=(3,), float32: largest usable amaxes since the last `advance`; None without a backward
            since. Not a buffer: DistributedDataParallel would replace it by that of process 0.
        version: of the weight, at the last forward.
        process_group: of `torch.distributed`, the processes that train the layer; None for all. A copy has
            None.
    """

    key: torch.Tensor
    scale: torch.Tensor
    amax_history: torch.Tensor
    step: torch.Tensor
    recorded: torch.Tensor | None
    process_group: Any
    version: tuple[int, int] | None

    def __init__(self, recipe: Recipe, device: torch.device | None = None, path: str = ""):
        super().__init__()
        self.recipe, self.path = recipe, path
        self.recorded = self.process_group = self.version = None
        for name, buffer in self._first().items():
            self.register_buffer(name, buffer.to(device))

    def _first(self) -> dict[str, torch.Tensor]:
        """The buffers before the first step."""
        recipe = self.recipe
        if recipe.has_blocks:
            # The weight's path in a Flax model of the same names, which has the same seeds.
            state = block.with_seeds(of_recipe(recipe).init(), f"{self.path}/kernel".lstrip("/"))
            return {name: torch.tensor(np.asarray(array), device="cpu") for name, array in state.items()}
        if recipe.scaling != "delayed":
            return {}
        with torch.device("cpu"):
            scale = torch.tensor(FIRST_SCALES[recipe.first_scale])
            first = {"scale": scale, "amax_history": torch.zeros(3, recipe.amax_history_len)}
            return first | ({"step": torch.zeros(())} if recipe.interval > 1 else {})

    def scale_for(self, operand: int, amax: Float[torch.Tensor, ""], limit: float) -> Float[torch.Tensor, ""]:
        """The scale of an operand's cast in this step, by its amax, float32."""
        margin = self.recipe.margin
        if self.recipe.scaling != "delayed":
            return casts.scale_of(amax, limit, margin=margin)
        scale = self.scale[operand].clone()
        if self.recipe.first_scale != "tensor":
            return scale
        return torch.where(scale == UNSET, casts.scale_of(amax, limit, margin=margin), scale)

    def record(self, amaxes: Sequence[torch.Tensor] = ()) -> None:
        """Records a backward, with the amaxes of the three operands of one matmul."""
        if "key" in self._buffers:
            self.recorded = torch.zeros(3, device=self.key.device)
        if self.recipe.scaling == "delayed":
            new = torch.stack([*amaxes])
            new = torch.where(casts.usable(new), new, 0.0)
            self.recorded = new if self.recorded is None else torch.maximum(self.recorded, new)

    @torch.no_grad()
    def advance(self) -> None:
        """Moves the recorded amaxes into the history, and sets the scales of the next step."""
        if self.recorded is None:
            return
        if "key" in self._buffers:
            self.key[1] += 1
            return self.forget()
        recipe = self.recipe
        recorded = self.recorded.to(self.scale.device)
        history = torch.cat([recorded[:, None], self.amax_history[:, :-1]], 1)
        amaxes = recorded if recipe.amax_compute_algo == "most_recent" else history.amax(1)
        limits = torch.tensor([format.max for format in operand_formats(recipe)], device=amaxes.device)
        scale = casts.scale_of(amaxes, limits, margin=recipe.margin, otherwise=self.scale)
        if recipe.interval > 1:
            is_due = self.step == 0
            if recipe.first_scale != "one":  # the first scale of an operand does not wait
                is_due = is_due | (self.amax_history.amax(1) == 0)
            scale = torch.where(is_due, scale, self.scale)
            self.step.copy_((self.step + 1) % recipe.interval)
        self.scale.copy_(scale)
        self.amax_history.copy_(history)
        self.forget()

    def forget(self) -> None:
        """Drops the recorded amaxes: a skipped step leaves the state unchanged."""
        self.recorded = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # which cannot be copied

    def _apply(self, fn: Any, recurse: bool = True) -> "ScalingState":
        """A move to a device; the state stays float32 when the model is cast, and starts anew from "meta"."""
        old = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, new in self.named_buffers():
            if old[name].is_meta and not new.is_meta:
                self._buffers[name] = self._first()[name].to(new.device)
            elif new.dtype != torch.float32:
                self._buffers[name] = old[name].to(new.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:  # pyright: ignore
        """Accepts a checkpoint of the plain model, without scaling state; the state then stays unchanged.

        Refuses scales that are zero, negative or not finite.
        """
        metadata, strict, missing_keys, *errors = args
        scale = state_dict.get(f"{prefix}scale")
        if scale is not None and not casts.usable(scale[scale != UNSET]).all():
            errors[-1].append(f"{prefix}scale: expected finite positive scales; got {scale.tolist()}.")
            return
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *errors)
        if any(name.startswith(prefix) for name in state_dict):
            missing_keys += missing


def advance(states: Sequence[ScalingState]) -> None:
    """Ends a step of a model: its scaling states advance, by the largest amaxes of all processes.

    Each process that trains the model must call this for the same layers.
    """
    if states and are_several(states[0].process_group):
        _merge_over_processes([state for state in states if state._buffers])
    for state in states:
        state.advance()


def _merge_over_processes(states: Sequence[ScalingState]) -> None:
    """Sets recorded amaxes to the largest of all processes; a process may have none."""
    if not states:
        return
    device = next(states[0].buffers()).device
    nothing = torch.full((3,), -1.0, device=device)
    recorded = [nothing if state.recorded is None else state.recorded.to(device) for state in states]
    merged = largest_of_all(torch.stack(recorded), states[0].process_group)
    for state, row, is_recorded in zip(states, merged, (merged[:, 0] >= 0).tolist(), strict=True):
        state.recorded = row if is_recorded else None


def operand_formats(recipe: Recipe) -> list[Format]:
    """The formats of input, weight and output gradient."""
    forward, backward = map(formats.get, recipe.gemm_formats)
    return [forward, forward, backward]
