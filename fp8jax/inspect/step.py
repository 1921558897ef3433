"""The training step that is inspected: gradients, an optimizer's step and new variables, over some devices.

    step = training_step(loss_fn, variables, tokens, recipe="O2", target="h200", devices=8, stage=2)
    lowered = targets.lower_for(step.function, *step.args, target="h200", devices=8, donate_argnums=(0, 1))

Only shapes are computed. With several devices they have shardings on `targets.mesh(target, devices)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from fp8jax import comm, gradients, optim
from fp8jax.inspect import targets
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS

OPTIMIZER = "optimizer"  # the named scope of the optimizer's operations


class Step(NamedTuple):
    """A training step."""

    function: Callable[..., Any]  # (variables, opt_state, *batch) -> new variables, new state, loss
    value_and_grad: Callable[..., Any]  # (variables, *batch) -> loss, gradients, variables
    args: tuple[PyTree, ...]  # shapes of variables, opt_state, *batch


def training_step(
    loss_fn: Callable[..., jax.Array],
    variables: PyTree,
    *inputs: PyTree,
    recipe: Recipe | str,
    optimizer: Callable[..., Any] = optim.adamw,
    target: str | targets.Target | None = None,
    devices: int = 1,
    stage: int = 0,
) -> Step:
    """The step of a loss function.

    Args:
        loss_fn: `loss_fn(variables, *inputs)`.
        variables: arrays or shapes.
        inputs, target, devices, stage: as in `fp8jax.inspect.memory.plan`.
        recipe: the recipe of the optimizer and of the communication.
        optimizer: called as `fp8jax.optim.adamw` is: with a learning rate, the recipe and `zero`.

    Raises:
        ValueError: no such target or stage; this process has fewer devices; an input has no rows to share.
        RuntimeError: the packages that compile for a target are missing.
    """
    checked = comm.Zero(targets.mesh(target, devices), stage=stage)
    zero = checked if devices > 1 else None
    tx = optimizer(1e-3, recipe, zero=zero)

    def init() -> tuple[PyTree, PyTree]:
        made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
        made = made if zero is None else zero.place(made)
        return made, tx.init(made)

    state, batch = jax.eval_shape(init), jax.eval_shape(lambda *batch: batch, *inputs)
    if zero is not None:
        state, batch = _placed(init, state, zero), _global_batch(batch, zero)
    value_and_grad = gradients.value_and_grad(loss_fn, zero=zero)

    def step(variables: PyTree, opt_state: PyTree, *batch: PyTree) -> tuple[PyTree, PyTree, Any]:
        loss, grads, variables = value_and_grad(variables, *batch)
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = tx.update(grads, opt_state, variables[PARAMS])
            return gradients.apply_updates(variables, updates), opt_state, loss

    return Step(step, value_and_grad, (*state, *batch))


def _placed(init: Callable[[], PyTree], shapes: PyTree, zero: comm.Zero) -> PyTree:
    """The shapes with the shardings to which `init` constrains them; all others are replicated."""
    jaxpr = jax.make_jaxpr(init)().jaxpr
    constrained = {  # by id, since a literal cannot be hashed
        id(eqn.outvars[0]): eqn.params["sharding"]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint"
    }
    replicated = NamedSharding(zero.mesh, PartitionSpec())
    leaves, treedef = jax.tree.flatten(shapes)
    shardings = [constrained.get(id(var), replicated) for var in jaxpr.outvars]
    return treedef.unflatten(
        leaf.update(sharding=sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def _global_batch(batch: PyTree, zero: comm.Zero) -> PyTree:
    """The batch of all devices, from the batch of one device."""
    sharding = NamedSharding(zero.mesh, PartitionSpec(zero.axis))

    def of_all(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not x.shape:
            raise ValueError(f"`inputs`: expected arrays with rows, for {zero.devices} devices; got {x}.")
        return x.update(shape=(x.shape[0] * zero.devices, *x.shape[1:]), sharding=sharding)

    return jax.tree.map(of_all, batch)
