"""The ZeRO stage and the batch that fit a GPU's memory, from compiled steps.

fit("fp8", lambda batch: subject("gpt-7b", batch=batch, remat=False), devices=8, target="h100")
"""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

from fp8jax.inspect import targets
from fp8jax.inspect.memory.planner import MemoryPlan, plan
from fp8jax.inspect.subject import Subject, transformed
from fp8jax.recipe import Recipe

# A tenth is left for fragments, NCCL's buffers and cuBLAS's workspaces.
USABLE = 0.9
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Fit(NamedTuple):
    """A step that fits."""

    batch: int  # on each device
    plan: MemoryPlan
    memory: int  # bytes of the GPU

    def __str__(self) -> str:
        return (
            f"{self.plan.total / 1e9:.1f} of {self.memory / 1e9:.1f} GB on each GPU, by the compiled step: "
            f"batch {self.batch} on each of {self.plan.devices}, ZeRO stage {self.plan.stage}"
        )


def fit(
    recipe: Recipe | str,
    of_batch: Callable[[int], Subject],
    *,
    target: str | targets.Target,
    devices: int = 1,
    checkpointing: str = "dots_fp8",
    batch: int | None = None,
    cache: pathlib.Path | None = None,
) -> Fit:
    """The lowest of the stages 2 and 3 (of one device, 0) that fits, with the largest power of two as batch.

    Args:
        recipe: a `Recipe`, or the text of one.
        of_batch: the plain model with the inputs of one device, for a batch size.
        target: a GPU, see `fp8jax.inspect.targets`.
        devices: how many.
        checkpointing: `gradient_checkpointing` of `fp8jax.transform`.
        batch: the only batch to try; None looks for the largest, up to 64.
        cache: see `plan`.

    Raises:
        ValueError: no stage fits, or see `plan`.
    """
    memory, needed = targets.get(target).memory, 0
    sizes, found = (batch,) if batch is not None else BATCHES, None
    for stage in (2, 3) if devices > 1 else (0,):
        for size in sizes:
            of = of_batch(size)
            model = transformed(of.model, recipe, gradient_checkpointing=checkpointing)
            where = {"devices": devices, "stage": stage, "target": target, "cache": cache}
            planned = plan(model, recipe, *of.inputs, loss=of.loss, **where)
            needed = planned.total
            if needed > USABLE * memory:
                break
            found = Fit(size, planned, memory)
        if found is not None:
            return found
    raise ValueError(
        f"`devices`: expected enough for {recipe}; got {devices}, which need {needed / 1e9:.1f} GB each "
        f"with batch {sizes[0]}, and a {targets.get(target).name} has {memory / 1e9:.1f} GB, of which "
        f"{USABLE:.0%} are used. Take more devices."
    )
