"""The outcome of one model of a run: its curves, sizes, scales and the memory of a step."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from fp8jax.inspect.memory import MemoryPlan
from fp8jax.train import metrics
from fp8jax.train.metrics import Bytes, Curves, ScaledTensor
from fp8jax.train.step.network import RunState
from fp8jax.train.trainer import Trainer


class MemoryPart(NamedTuple):
    """A part of the memory of a step, in bytes on one device; None where a column does not tell it apart."""

    part: str
    arrays: int | None  # of the arrays between two steps
    compiled: int | None  # by the compiled program


class Outcome(NamedTuple):
    """One model at the end of a run."""

    curves: Curves
    amount: int  # tokens or rows of a step
    parameters: int
    bytes: Bytes
    tensors: list[ScaledTensor]  # those with a delayed scale; may be empty
    layers: str  # which layers run in FP8 and why the others do not
    memory: list[MemoryPart]  # of a step
    unit: str = "tokens"
    is_of_cpu: bool = False  # then its speed says nothing about FP8

    @property
    def validation_loss(self) -> float | None:
        """The validation loss after the last step; None where there was no validation."""
        return self.curves.validation[-1][1] if self.curves.validation else None

    @property
    def final_loss(self) -> float:
        """The last validation loss; without one the mean training loss of the last tenth of the run."""
        if self.validation_loss is not None:
            return self.validation_loss
        last = self.curves.loss[-max(len(self.curves.loss) // 10, 1) :]
        finite = [loss for loss in last if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else math.nan

    @property
    def mean_unchanged(self) -> float:
        """The mean share of the weights that a step left unchanged; 0 where it is not counted."""
        shares = [share for _, share in self.curves.unchanged]
        return sum(shares) / max(len(shares), 1)

    @property
    def loss_name(self) -> str:
        """The name of the final loss."""
        return "training loss" if self.validation_loss is None else "validation loss"


Outcomes = Mapping[str, Outcome]


def outcome_of(trainer: Trainer, state: RunState, curves: Curves, per_step: tuple[int, str]) -> Outcome:
    """The outcome of a trainer after the last step.

    A step trains on `per_step` tokens or rows: (768, "tokens").
    """
    collections = trainer.network.collections(state.variables)
    return Outcome(
        curves=curves,
        amount=per_step[0],
        unit=per_step[1],
        parameters=metrics.parameters(collections),
        bytes=metrics.bytes_per_parameter(collections, trainer.gradients(), state.opt_state),
        tensors=metrics.scaled_tensors(collections),
        layers=trainer.layers,
        memory=memory_of(trainer.plan(), trainer.program.arguments),
        is_of_cpu=trainer.placement.mesh.devices.flat[0].platform == "cpu",
    )


def memory_of(plan: MemoryPlan, arguments: int) -> list[MemoryPart]:
    """The memory of a step by part; the compiled step takes `arguments` bytes of arguments."""
    return [
        MemoryPart("weights, with scales and statistics", plan.weights, None),
        MemoryPart("moments", plan.moments, None),
        MemoryPart("master weights and remainders", plan.master, None),
        MemoryPart("batch and counters", plan.inputs, None),
        MemoryPart("arguments of a step: all of these", plan.stored, arguments),
        MemoryPart("gradients, activations and temporaries", None, plan.total - arguments),
        MemoryPart("peak", None, plan.total),
    ]
