"""Bytes of a training step on each device, read from its compiled program.

    plan(model, "O2", tokens, loss=loss, devices=8, stage=2, target="h200")
    MemoryPlan(weights=..., moments=..., master=..., inputs=..., temporaries=..., sent=...)

The step is compiled for a GPU that is not here, or for this process's devices, and does not run. The peak and
the bytes sent are those of the program. Bytes stored between steps are counted from shapes and shardings.
"""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from fp8jax.inspect import program, targets
from fp8jax.inspect.memory.cache import Figures, cached, path_of
from fp8jax.inspect.step import training_step
from fp8jax.inspect.subject import loss_of, mean_square, transformed
from fp8jax.inspect.tables import records
from fp8jax.optim.state import is_adam_state
from fp8jax.recipe import Recipe

# LLVM's passes take a third of the time on a CPU, and the peak is the same without them.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class MemoryPlan(NamedTuple):
    """Bytes on each device, at the peak of a step."""

    recipe: str
    stage: int  # of ZeRO
    devices: int
    weights: int  # codes and scales, and scaling state
    moments: int
    master: int
    inputs: int  # the batch, and an optimizer's counters
    temporaries: int  # the peak less the bytes stored: gradients, activations and all other temporaries
    sent: int  # bytes that each device sends in a step, collectives going around rings

    @property
    def stored(self) -> int:
        """Bytes between steps, with the batch."""
        return self.weights + self.moments + self.master + self.inputs

    @property
    def total(self) -> int:
        """The peak of the compiled program."""
        return self.stored + self.temporaries


def plan(
    model: Any,
    recipe: Recipe | str,
    *inputs: PyTree,
    loss: Callable[..., jax.Array] | None = None,
    devices: int = 1,
    stage: int = 0,
    target: str | targets.Target | None = None,
    cache: pathlib.Path | None = None,
) -> MemoryPlan:
    """The memory of a jitted training step with donated state.

    For a loss function or another optimizer see `plan_step` and `fp8jax.inspect.step.training_step`.

    Args:
        model: a model that `fp8jax.transform` takes or returns, of arrays or shapes.
        recipe: a `Recipe`, or the text of one.
        inputs: of the model on one device: arrays or `jax.ShapeDtypeStruct`s. Only shapes and dtypes are
            used. For a function of parameters, its parameters and the inputs.
        loss: `loss(outputs, *inputs)`, without parameters; by default the mean square of the outputs.
        devices: how many, each with a batch like `inputs`.
        stage: of ZeRO, see `fp8jax.comm.Zero`.
        target: name of a GPU that need not be here, or a `Target`; None for this process's devices.
        cache: folder of finished plans, as `cache.default_folder` gives; None for no cache.

    Returns:
        The plan. Its `total` is the peak that the compiler reports for one device.

    Raises:
        TypeError: see `fp8jax.transform`.
        ValueError: the recipe cannot be parsed; no such target or stage; this process has fewer devices.
        RuntimeError: the packages that compile for a target are missing.
    """
    recipe = Recipe.parse(recipe)
    loss_fn, args = loss_of(transformed(model, recipe), inputs, loss or mean_square)
    where: dict[str, Any] = {"target": target, "devices": devices}
    step = training_step(loss_fn, *args, recipe=recipe, stage=stage, **where)
    return plan_step(step.function, *step.args, recipe=str(recipe), cache=cache, **where)._replace(
        stage=stage
    )


def plan_step(
    step: Callable[..., Any],
    variables: PyTree,
    opt_state: PyTree,
    *batch: PyTree,
    recipe: str = "",
    target: str | targets.Target | None,
    devices: int = 1,
    cache: pathlib.Path | None = None,
) -> MemoryPlan:
    """The memory of the user's own training step, with donated state.

    Args:
        step: `step(variables, opt_state, *batch)` returns new variables, a new state and anything else.
        variables, opt_state, batch: arrays or `jax.ShapeDtypeStruct`s. With several devices they have
            shardings on `targets.mesh(target, devices)`.
        recipe: the plan's name.
        target: name of a GPU that need not be here; None for this process's devices.
        devices: that share the step.
        cache: as in `plan`.
    """
    args = (variables, opt_state, *batch)
    lowered = targets.lower_for(step, *args, target=target, devices=devices, donate_argnums=(0, 1))

    def figures() -> Figures:
        is_cpu = target is None and jax.devices()[0].platform == "cpu"
        compiled = lowered.compile(compiler_options=_QUICK) if is_cpu else targets.compile(lowered, target)
        found = program.read(compiled)
        return Figures(found.total, found.sent(devices))

    row = figures() if cache is None else cached(path_of(lowered, target, cache), figures)
    return plan_of(variables, opt_state, batch, **row._asdict(), recipe=recipe, devices=devices)


def plan_of(
    variables: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    *,
    total: int,
    sent: int = 0,
    recipe: str = "",
    stage: int = 0,
    devices: int = 1,
) -> MemoryPlan:
    """The plan of a step that is compiled already.

    Args:
        variables, opt_state, batch: the step's arguments: arrays, or shapes with their shardings. An array
            with a sharding counts one device's shard, and nothing in the memory of an accelerator's host.
        total: the program's peak, `CompiledProgram.total`.
        sent: bytes that each device sends, `CompiledProgram.sent`.
        recipe, stage, devices: as in `MemoryPlan`.
    """
    stored = _between_steps(variables, opt_state, batch)
    return MemoryPlan(recipe, stage, devices, **stored, temporaries=total - sum(stored.values()), sent=sent)


def table(plans: Sequence[MemoryPlan]) -> str:
    """A row for each plan, in GB, or in MB where no plan reaches 1 GB."""
    name, unit = ("GB", 1e9) if max(plan.total for plan in plans) >= 1e9 else ("MB", 1e6)
    parts = ("weights", "moments", "master", "inputs", "temporaries", "total", "sent")
    return records(
        [
            {f"{name} on each device": plan.recipe, "ZeRO": plan.stage, "devices": plan.devices}
            | {part: getattr(plan, part) / unit for part in parts}
            for plan in plans
        ]
    )


def _between_steps(variables: PyTree, opt_state: PyTree, batch: PyTree) -> dict[str, int]:
    """Bytes on one device of each kind of array, as in `MemoryPlan`."""
    arrays = [("weights", variables), ("inputs", batch)]
    for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state):
        if is_adam_state(node):
            arrays += [("moments", (node.adam.mu, node.adam.nu)), ("master", (node.master, node.remainder))]
            arrays.append(("inputs", (node.adam.count, node.skipped, node.key)))
        else:
            arrays.append(("moments" if node.ndim else "inputs", node))
    found = {"weights": 0, "moments": 0, "master": 0, "inputs": 0}
    for kind, tree in arrays:
        found[kind] += sum(map(_bytes_on_one_device, jax.tree.leaves(tree)))
    return found


def _bytes_on_one_device(leaf: Any) -> int:
    sharding, shape = getattr(leaf, "sharding", None), leaf.shape
    if sharding is not None:
        is_cpu = next(iter(sharding.device_set)).platform == "cpu"  # a CPU has only one memory
        if not is_cpu and sharding.memory_kind in ("pinned_host", "unpinned_host"):
            return 0
        shape = sharding.shard_shape(shape)
    return math.prod(shape) * leaf.dtype.itemsize
