"""The scaling state of one layer, as in `fp8jax.scaling`, for input, weight and output gradient.

It is a submodule named `fp8` of each FP8 layer, and so a part of `state_dict`. A backward pass records
amaxes; microbatches, several uses of a layer, recomputed activations and processes merge by their maximum.
`advance` moves the amaxes into the history once per optimizer step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float

from fp8jax.quantization import UNSET
from fp8jax.recipe import Recipe
from fp8jax_torch import casts
from fp8jax_torch.processes import are_several, largest_of_all
from fp8jax_torch.scaling.base import Scaling
from fp8jax_torch.scaling.scalings import of_recipe


class ScalingState(torch.nn.Module):
    """Scaling state of the operands input, weight and output gradient, in this order.

    The buffers are those of the recipe's scaling.

    Attributes:
        path: the layer's path.
        recorded: shape=(3,), float32: largest usable amaxes since the last `advance`, None if there are none.
            Not a buffer: DistributedDataParallel would replace it by process 0's.
        has_backward: whether a backward recorded an amax, and not only a forward without one.
        is_called: whether the layer had a forward.
        has_optimizer: whether an optimizer that advances this state has taken a step, or ended gradients.
        is_without_optimizer: whether no optimizer was prepared with the model, so that a forward after a
            backward advances this state.
        process_group: of `torch.distributed`, the processes that train the layer; None for all. A copy has
            None, and no optimizer.
    """

    recorded: torch.Tensor | None
    has_backward = is_called = has_optimizer = is_without_optimizer = False
    process_group: Any

    def __init__(self, recipe: Recipe, device: torch.device | None = None, path: str = ""):
        super().__init__()
        self.recipe, self.path = recipe, path
        self.recorded = self.process_group = None
        for name, buffer in self._first().items():
            self.register_buffer(name, buffer.to(device))

    @property
    def scaling(self) -> Scaling:
        """The scaling of the recipe."""
        return of_recipe(self.recipe)

    def _first(self) -> dict[str, torch.Tensor]:
        """The buffers before the first step."""
        with torch.device("cpu"):
            return self.scaling.init(self.path)

    def record(self, *amaxes: Float[torch.Tensor, ""] | None, has_backward: bool = True) -> None:
        """Records the amaxes of the three operands of a matmul, in its backward, or in its forward if it has
        none; None counts as 0."""
        if self._buffers:
            device = next(self.buffers()).device
            zero = torch.zeros((), dtype=torch.float32, device=device)
            new = torch.stack([zero if x is None else x for x in amaxes])
            new = torch.where(casts.usable(new), new, 0.0)
            self.recorded = new if self.recorded is None else torch.maximum(self.recorded, new)
            self.has_backward |= has_backward

    @torch.no_grad()
    def advance(self) -> None:
        """Changes the state for the next step, if amaxes were recorded."""
        if self.recorded is not None:
            self.scaling.update(self)
            self.forget()

    def begin_forward(self) -> None:
        """Notes a call of the layer. Without an optimizer the first one after a backward advances the state,
        also in a model that is called by its parts; several processes advance together, in the model's call.
        """
        self.is_called = True
        is_due = self.is_without_optimizer and self.has_backward
        if is_due and not is_in_backward() and not are_several(self.process_group):
            self.advance()

    def forget(self) -> None:
        """Drops the recorded amaxes: a skipped step leaves the state unchanged."""
        self.recorded, self.has_backward = None, False

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other tensors.
        return {**self.__dict__, "process_group": None, "has_optimizer": False}

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

        Takes the amaxes of another recipe, too. Refuses scales that are zero, negative or not finite.
        """
        metadata, strict, missing_keys, *errors = args
        scale = state_dict.get(f"{prefix}scale")
        if scale is not None and not casts.usable(scale[scale != UNSET]).all():
            errors[-1].append(f"{prefix}scale: expected finite positive scales; got {scale.tolist()}.")
            return
        self.scaling.convert(self, state_dict, prefix)
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *errors)
        if any(name.startswith(prefix) for name in state_dict):
            missing_keys += missing


def is_in_backward() -> bool:
    """Whether a backward runs, whose forwards recompute activations."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


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
    nothing = torch.full((3,), -1.0, dtype=torch.float32, device=device)
    recorded = [nothing if state.recorded is None else state.recorded.to(device) for state in states]
    merged = largest_of_all(torch.stack(recorded), states[0].process_group)
    for state, row, is_recorded in zip(states, merged, (merged[:, 0] >= 0).tolist(), strict=True):
        state.recorded = row if is_recorded else None
