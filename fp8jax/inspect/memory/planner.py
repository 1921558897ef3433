"""Bytes on each device of a training step, read from its compiled program.

    plan(model, "O2", tokens, loss=loss, devices=8, stage=2, target="h200")
    Plan(weights=..., moments=..., master=..., inputs=..., temporaries=..., sent=...)

The step is compiled for a GPU that is not here, or for this process's devices, and not run. Bytes that stay
between steps are counted from shapes and shardings; the peak and the bytes sent are the compiled program's.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8jax import adapters, comm, gradients, optim
from fp8jax.adapters import linen, nnx
from fp8jax.inspect import models, program, targets
from fp8jax.inspect.memory import cache as rows
from fp8jax.inspect.memory.state import bytes_by_kind
from fp8jax.inspect.memory.subject import mean_square
from fp8jax.recipe import Recipe

# LLVM's passes take a third of the time on a CPU, and the peak is the same without them.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Plan(NamedTuple):
    """Bytes on each device, at the peak of a step."""

    recipe: str
    stage: int  # of ZeRO
    devices: int
    weights: int  # codes and scales, and scaling state
    moments: int
    master: int
    inputs: int  # the batch, and an optimizer's counters
    temporaries: int  # the peak less what is kept: gradients, activations and all other
    sent: int  # bytes that each device sends in a step, collectives going around rings

    @property
    def kept(self) -> int:
        """What stays between steps, and the batch."""
        return self.weights + self.moments + self.master + self.inputs

    @property
    def total(self) -> int:
        """The peak of the compiled program."""
        return self.kept + self.temporaries


def plan(
    model: Any,
    recipe: Recipe | str,
    *inputs: Any,
    loss: Callable[..., Any] | None = None,
    variables: Any = None,
    devices: int = 1,
    stage: int = 0,
    target: str | targets.Target | None = None,
    optimizer: Callable[..., Any] = optim.adamw,
    cache: pathlib.Path | None = None,
) -> Plan:
    """The memory of a jitted training step whose state is donated.

    Args:
        model: a Linen or NNX module, plain or transformed, an NNX module of arrays or shapes; or with
            `variables` a loss function, `model(variables, *inputs)`.
        recipe: a `Recipe`, or the text of one.
        inputs: the model's, or the loss function's, on one device: arrays or `jax.ShapeDtypeStruct`s. Only
            shapes and dtypes are used.
        loss: `loss(outputs, *inputs)`; by default the mean of the outputs' squares.
        variables: with a loss function: its variables.
        devices: how many, each with a batch like `inputs`.
        stage: of ZeRO, see `fp8jax.comm.Zero`.
        target: name of a GPU that need not be here, or a `Target`; None for this process's devices.
        optimizer: called as `fp8jax.optim.adamw` is: with a learning rate, the recipe and `zero`.
        cache: folder of finished plans, as `cache.default_folder` gives; None for no cache.

    Returns:
        The plan. Its `total` is the peak that the compiler reports for one device.

    Raises:
        TypeError: `model` is neither.
        ValueError: the recipe cannot be parsed; no such target or stage; fewer devices here than `devices`.
        RuntimeError: the packages that compile for a target are missing.
    """
    recipe = Recipe.parse(recipe)
    mesh = targets.here(devices) if target is None else targets.mesh(target, devices)
    zero = comm.Zero(mesh, recipe, stage)
    used = zero if devices > 1 else None
    loss_fn, variables = _loss_of(model, recipe, loss or mean_square, variables, inputs)
    tx = optimizer(1e-3, recipe, zero=used)

    def init() -> Any:
        made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
        made = made if used is None else used.place(made)
        return made, tx.init(made)

    def step(variables: Any, opt_state: Any, *batch: Any) -> Any:
        loss, grads = gradients.value_and_grad(loss_fn, zero=used)(variables, *batch)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return gradients.apply_updates(variables, updates), opt_state, loss

    state, batch = jax.eval_shape(init), jax.tree.map(_shape_of, inputs)
    if used is not None:
        state, batch = _placed(init, state, mesh), _of_all(batch, used)
    found = plan_step(step, *state, *batch, recipe=str(recipe), target=target, devices=devices, cache=cache)
    return found._replace(stage=stage)


def plan_step(
    step: Callable[..., Any],
    variables: Any,
    opt_state: Any,
    *batch: Any,
    recipe: str = "",
    target: str | targets.Target | None,
    devices: int = 1,
    cache: pathlib.Path | None = None,
) -> Plan:
    """The memory of a training step of one's own, whose state is donated.

    Args:
        step: `step(variables, opt_state, *batch)` gives the same two and anything else.
        variables, opt_state, batch: arrays or `jax.ShapeDtypeStruct`s. With several devices they have
            shardings: on `targets.mesh(target, devices)`, or on a mesh of this process's devices.
        recipe: the plan's name.
        target: name of a GPU that need not be here; None for this process's devices.
        devices: that share the step.
        cache: as in `plan`.
    """
    args = (variables, opt_state, *batch)
    if target is None:
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
    else:
        lowered = targets.lower_for(step, *args, target=target, devices=devices, donate_argnums=(0, 1))
    row = _compiled(lowered, target, devices, cache)
    return plan_of(variables, opt_state, batch, **row._asdict(), recipe=recipe, devices=devices)


def plan_of(
    variables: Any,
    opt_state: Any,
    batch: Any,
    *,
    total: int,
    sent: int = 0,
    recipe: str = "",
    stage: int = 0,
    devices: int = 1,
) -> Plan:
    """The plan of a step that is compiled already.

    Args:
        variables, opt_state, batch: the step's arguments: arrays, or shapes with their shardings.
        total: the program's peak, `Program.total`.
        sent: bytes that one device sends, `Program.sent`.
        recipe, stage, devices: as in `Plan`.
    """
    kept = bytes_by_kind(variables, opt_state, batch)
    return Plan(recipe, stage, devices, **kept, temporaries=total - sum(kept.values()), sent=sent)


def _compiled(
    lowered: jax.stages.Lowered, target: str | targets.Target | None, devices: int, cache: pathlib.Path | None
) -> rows.Row:
    """The row of a program, from the cache if it is there."""
    path = None if cache is None else rows.path_of(lowered, target, cache)
    row = None if path is None else rows.read(path)
    if row is None:
        options = targets.COMPILER_OPTIONS
        if target is None:
            options = _QUICK if jax.devices()[0].platform == "cpu" else None
        found = program.read(lowered.compile(compiler_options=options))
        row = rows.Row(found.total, found.sent(devices))
        if path is not None:
            rows.write(path, row)
    return row


def _loss_of(
    model: Any, recipe: Recipe, loss: Callable[..., Any], variables: Any, inputs: tuple[Any, ...]
) -> tuple[Callable[..., Any], Any]:
    """The loss as a function of variables and a batch, and the shapes of the variables."""
    if variables is not None:
        return model, variables
    if linen.is_module(model):
        model = adapters.transform(model, recipe)
    if isinstance(model, linen.LinenModel):
        loss_fn = lambda variables, *batch: loss(model.apply(variables, *batch), *batch)  # noqa: E731
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)  # noqa: E731
        return loss_fn, jax.eval_shape(lambda: model.init(jax.random.key(0), *zeros()))
    if nnx.is_module(model):
        model = model if nnx.recipes(model) else models.under(model, recipe)
        return models.loss_of_transformed(model, loss)
    raise TypeError(
        "`model`: expected a Flax module, Linen or NNX, or a loss function with its `variables`; got "
        f"{type(model).__name__}."
    )


def _placed(init: Callable[[], Any], shapes: Any, mesh: Mesh) -> Any:
    """The shapes with the shardings that `init` constrains them to; all others are replicated."""
    jaxpr = jax.make_jaxpr(init)().jaxpr
    constrained = {  # a literal cannot be hashed
        id(eqn.outvars[0]): eqn.params["sharding"]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint"
    }
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves, treedef = jax.tree.flatten(shapes)
    shardings = [constrained.get(id(var), replicated) for var in jaxpr.outvars]
    return treedef.unflatten(map(_shape_of, leaves, shardings))


def _of_all(batch: Any, zero: comm.Zero) -> Any:
    """A device's batch as that of all devices."""
    sharding = NamedSharding(zero.mesh, PartitionSpec(zero.axis))

    def of_all(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not x.shape:
            raise ValueError(f"`inputs`: expected arrays with rows, for {zero.devices} devices; got {x}.")
        return jax.ShapeDtypeStruct((x.shape[0] * zero.devices, *x.shape[1:]), x.dtype, sharding=sharding)

    return jax.tree.map(of_all, batch)


def _shape_of(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
