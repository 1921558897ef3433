"""Bytes on each device of a training step, before there is one.

    plan(model, "O2", tokens, loss=loss, devices=8, stage=2, target="h200")
    Plan(weights=..., moments=..., master=..., gradients=..., activations=..., temporaries=..., sent=...)

What is kept between steps is counted from shapes, exactly. The rest is simulated: the step is traced, its
operations are fused as XLA would fuse them, and run through in the order that XLA would choose; the fullest
moment is the prediction. What devices send is counted from the traced collectives.

| room | question |
|---|---|
| `graph` | what does the step compute? |
| `fusion` | which of it is stored? |
| `orders` | in which order? |
| `sweep` | how much is there at once? |
| `advice` | which dimensions cost more than they give? |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from fp8jax import comm, gradients, models, optim, targets
from fp8jax.memory.graph import Graph, Op, Value, of_jaxpr
from fp8jax.memory.sweep import Most, sweep
from fp8jax.models import linen, nnx, probe
from fp8jax.optim.state import is_adam_state
from fp8jax.recipe import Recipe
from fp8jax.scaled import is_scaled
from fp8jax.variables import PARAMS

_GRADIENT = "loss_and_gradients"  # the name of the function below


class Plan(NamedTuple):
    """Bytes on each device, at the moment of a step when memory is fullest."""

    recipe: str
    stage: int  # of ZeRO
    devices: int
    weights: int  # codes and scales, and scaling state
    moments: int
    master: int
    inputs: int  # the batch, and an optimizer's counters
    gradients: int
    activations: int  # what the forward keeps for the backward
    temporaries: int
    sent: int  # bytes that each device sends in a step, collectives going around rings

    @property
    def kept(self) -> int:
        """What stays between steps, and the batch."""
        return self.weights + self.moments + self.master + self.inputs

    @property
    def total(self) -> int:
        """All but what is sent."""
        return self.kept + self.gradients + self.activations + self.temporaries


def plan(
    model: Any,
    recipe: Recipe | str,
    *inputs: Any,
    loss: Callable[..., Any] | None = None,
    variables: Any = None,
    devices: int = 1,
    stage: int = 0,
    target: str | None = None,
    optimizer: Callable[..., Any] = optim.adamw,
) -> Plan:
    """Predicts the memory of a jitted training step whose state is donated.

    Args:
        model: a Linen or NNX module, plain or transformed, an NNX module of arrays or shapes; or with
            `variables` a loss function, `model(variables, *inputs)`.
        recipe: a `Recipe`, or the text of one.
        inputs: the model's, or the loss function's, on one device: arrays or `jax.ShapeDtypeStruct`s,
            of which only shapes and dtypes are looked at.
        loss: `loss(outputs, *inputs)`; by default the mean of the outputs' squares.
        variables: with a loss function: what it takes.
        devices: how many, each with a batch like `inputs`.
        stage: of ZeRO, see `fp8jax.comm.Zero`.
        target: name of a GPU; None for a processor like this one.
        optimizer: called as `fp8jax.optim.adamw` is: with a learning rate, the recipe and `zero`.

    Returns:
        The prediction. Programs compiled by jaxlib 0.10.2 for one GPU were seen to need at most 10% more
        or less, and so were those for eight, but for TransformerEngine's recipe in stages 2 and 3, which
        needs up to 20% more; see the README.

    Raises:
        TypeError: `model` is neither.
        ValueError: the recipe cannot be parsed; no such target or stage.
    """
    recipe = Recipe.parse(recipe)
    if target is not None:
        targets.get(target)
    if devices < 1:
        raise ValueError(f"`devices`: expected a positive number; got {devices}.")
    batch = tuple(_of_all(x, devices) for x in inputs)
    loss_fn, make = _loss_of(model, recipe, loss or mean_square, variables, inputs)
    mesh: Any = AbstractMesh((devices,), ("devices",))  # of no devices in particular
    zero = comm.Zero(mesh, recipe, stage)
    used = zero if devices > 1 else None
    tx = optimizer(1e-3, recipe, zero=used)
    state = jax.eval_shape(make)
    opt_state = jax.eval_shape(tx.init, state)

    # Named, so that its results are found in the graph.
    def loss_and_gradients(variables: Any, *batch: Any) -> Any:
        return gradients.value_and_grad(loss_fn, zero=used)(variables, *batch)

    def step(variables: Any, opt_state: Any, *batch: Any) -> Any:
        loss, grads = jax.jit(loss_and_gradients)(variables, *batch)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return gradients.apply_updates(variables, updates), opt_state, loss

    shapes = _shapes(zero, state[PARAMS])
    parts = _parts(zero, state, opt_state, batch) if stage else _whole(state, opt_state, batch, devices)
    found = _simulated(step, (state, opt_state), batch, parts, shapes, target, devices)
    return Plan(str(recipe), stage, devices, **found)


def plan_step(
    step: Callable[..., Any],
    variables: Any,
    opt_state: Any,
    *batch: Any,
    recipe: str = "",
    target: str | None,
) -> Plan:
    """Predicts the memory of a jitted training step of one's own, on one device, whose state is donated.

    Args:
        step: `step(variables, opt_state, *batch)` gives the same two and anything else. Activations are told
            from temporaries if a jitted function named `loss_and_gradients` in it gives first the loss, then
            the gradients.
        variables, opt_state, batch: arrays or `jax.ShapeDtypeStruct`s.
        recipe: the plan's name.
        target: name of a GPU; None for a processor like this one.
    """
    kinds = _whole(variables, opt_state, batch)
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(variables)}
    return Plan(recipe, 0, 1, **_simulated(step, (variables, opt_state), batch, kinds, shapes, target))


def kinds_of(variables: Any, opt_state: Any) -> list[str]:
    """What each array of a step's state is: "weights", "moments", "master" or "inputs", as in a `Plan`."""
    kinds = ["weights"] * len(jax.tree.leaves(variables))
    for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state):
        masters = len(jax.tree.leaves(node.master)) if is_adam_state(node) else 0
        leaves = jax.tree.leaves(node)
        # An Adam's masters come last but for a counter.
        first = len(leaves) - 1 - masters
        for i, leaf in enumerate(leaves):
            is_master = masters and first <= i < len(leaves) - 1
            kinds.append("master" if is_master else "moments" if leaf.ndim else "inputs")
    return kinds


def _whole(variables: Any, opt_state: Any, batch: Any, devices: int = 1) -> list[tuple[str, int]]:
    """Of each array of a step's arguments, what it is, and among how many devices it is split: the batch."""
    state = [(kind, 1) for kind in kinds_of(variables, opt_state)]
    return state + [("inputs", devices)] * len(jax.tree.leaves(batch))


def _simulated(
    step: Callable[..., Any],
    state: tuple[Any, Any],
    batch: tuple[Any, ...],
    kinds: list[tuple[str, int]],
    shapes: set[tuple[int, ...]],
    target: str | None,
    devices: int = 1,
) -> dict[str, int]:
    """The fields of a plan that are bytes, of a step whose state is donated.

    Args:
        kinds: of each array of the arguments, what it is, and among how many devices it is split.
        shapes: those of parameters.
    """
    graph = of_jaxpr(jax.make_jaxpr(step)(*state, *batch), "cpu" if target is None else "gpu")
    kept: dict[str, int] = {"weights": 0, "moments": 0, "master": 0, "inputs": 0}
    for value, (name, count) in zip(graph.inputs, kinds, strict=True):
        value.divide(count)
        kept[name] += value.bytes
    count = len(jax.tree.leaves(state))
    donated, graph.fixed = graph.inputs[:count], graph.inputs[count:]
    most = sweep(graph, donated)
    return {**kept, **_at_most(graph, most, shapes), "sent": _sent(graph, devices)}


def mean_square(outputs: jax.Array, *inputs: Any) -> jax.Array:
    """The mean of the outputs' squares, whatever the inputs: a loss for a model that has none."""
    del inputs
    return jnp.mean(jnp.square(outputs.astype(jnp.float32)))


def fullest(
    step: Callable[..., Any], *args: Any, donate_argnums: tuple[int, ...] = (), target: str | None
) -> int:
    """Bytes of any jitted function on one device: arguments, results and all between, at the fullest moment.

    Args:
        step: the function.
        args: arrays or `jax.ShapeDtypeStruct`s.
        donate_argnums: as in `jax.jit`.
        target: name of a GPU; None for a processor like this one.
    """
    graph = of_jaxpr(jax.make_jaxpr(step)(*args), "cpu" if target is None else "gpu")
    leaves = [jax.tree.leaves(arg) for arg in args]
    ends = [sum(map(len, leaves[: i + 1])) for i in range(len(leaves))]
    donated = [v for i in donate_argnums for v in graph.inputs[ends[i] - len(leaves[i]) : ends[i]]]
    graph.fixed = [value for value in graph.inputs if value not in donated]
    return sum(value.bytes for value in graph.inputs) + sweep(graph, donated).bytes


def _loss_of(
    model: Any, recipe: Recipe, loss: Callable[..., Any], variables: Any, inputs: tuple[Any, ...]
) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The loss as a function of variables and a batch, and what makes the variables."""

    def zeros_like(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    if variables is not None:
        return model, lambda: zeros_like(variables)

    if linen.is_module(model):
        model = models.transform(model, recipe)
    if isinstance(model, linen.LinenModel):
        loss_fn = lambda variables, *batch: loss(model.apply(variables, *batch), *batch)  # noqa: E731
        return loss_fn, lambda: model.init(jax.random.key(0), *zeros_like(inputs))
    if nnx.is_module(model):
        model = model if nnx.recipes(model) else probe.under(model, recipe)
        loss_fn, variables = probe.loss_of_transformed(model, loss)
        return loss_fn, lambda: zeros_like(variables)
    raise TypeError(
        "`model`: expected a Flax module, Linen or NNX, or a loss function with its `variables`; got "
        f"{type(model).__name__}."
    )


def _of_all(x: Any, devices: int) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct((aval.shape[0] * devices, *aval.shape[1:]), aval.dtype)


def _parts(zero: comm.Zero, variables: Any, opt_state: Any, batch: Any) -> list[tuple[str, int]]:
    """Of each array of the step's arguments, what it is, and among how many devices it is split."""

    def of(tree: Any, name: str, like: Any, is_split: bool) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for leaf, param in zip(jax.tree.leaves(tree, is_leaf=is_scaled), like, strict=True):
            count = zero.devices if is_split and param is not None and zero.split_of(param) else 1
            found += [(name, count), (name, 1)] if is_scaled(leaf) else [(name, count)]
        return found

    params = jax.tree.leaves(variables[PARAMS], is_leaf=is_scaled)
    found = []
    for name in sorted(variables):
        leaves = jax.tree.leaves(variables[name], is_leaf=is_scaled)
        is_params = name == PARAMS
        found += of(leaves, "weights", params if is_params else [None] * len(leaves), zero.stage == 3)
    for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state):
        if not is_adam_state(node):
            found.append(("inputs", 1))
            continue
        is_split = zero.stage >= 1
        found.append(("inputs", 1))  # the count
        for moment in (node.adam.mu, node.adam.nu):
            found += of(moment, "moments", params, is_split)
        masters = jax.tree.structure(variables[PARAMS], is_leaf=is_scaled).flatten_up_to(node.master)
        with_master = [param for param, master in zip(params, masters, strict=True) if master is not None]
        found += of(node.master, "master", with_master, is_split)
        found.append(("inputs", 1))  # how many were skipped
    return found + [("inputs", zero.devices)] * len(batch)


def _shapes(zero: comm.Zero, params: Any) -> set[tuple[int, ...]]:
    """Those of parameters, whole and as one device's parts."""
    shapes: set[tuple[int, ...]] = set()
    for leaf in jax.tree.leaves(params, is_leaf=is_scaled):
        axis, shape = zero.split_of(leaf), list(leaf.shape)
        shapes.add(tuple(shape))
        if axis is not None:
            shape[axis] //= zero.devices
            shapes.add(tuple(shape))
    return shapes


def _at_most(graph: Graph, most: Most, shapes: set[tuple[int, ...]]) -> dict[str, int]:
    """The fullest moment, by part: what the loss was computed with are activations, arrays with shapes of
    parameters that are computed for gradients are gradients."""
    marked = graph.marks.get(_GRADIENT, [])
    forward, grads = _behind(marked[:1]), marked[1:]
    backward = _behind(grads) - forward
    found = {"gradients": 0, "activations": 0}
    for value in most.live:
        op = _unconverted(value).op
        if op in forward:
            found["activations"] += value.cost
        elif op in backward and value.shape in shapes:
            found["gradients"] += value.cost
    return {**found, "temporaries": most.bytes - sum(found.values())}


def _unconverted(value: Value) -> Value:
    while value.op is not None and value.op.name == "convert_element_type":
        value = value.op.reads[0]
    return value


def _behind(values: list[Value]) -> set[Op]:
    """The ops that compute values."""
    found: set[Op] = set()
    left = [value.op for value in values]
    while left:
        op = left.pop()
        if op is not None and op not in found:
            found.add(op)
            left += [value.op for value in op.reads]
    return found


def _sent(graph: Graph, devices: int) -> int:
    """Bytes that one device sends if each collective goes around a ring."""
    around, total = (devices - 1) / devices, 0.0
    for op in graph.ops:
        if op.kind == "loop":
            runs = op.params["length"] if op.name == "scan" else 1
            total += runs * max(_sent(body, devices) for body in op.bodies)
        total += around * _crossing(op)
    return round(total)


def _crossing(op: Op) -> int:
    """Bytes of a collective's data: of the whole; twice that where it is added and sent back."""
    if op.name in ("all_gather", "all_to_all"):
        return sum(value.bytes for value in op.writes)
    if op.name in ("psum", "pmax", "pmin"):
        return 2 * sum(value.bytes for value in op.reads)
    return sum(value.bytes for value in op.reads) if op.name in ("reduce_scatter", "psum_scatter") else 0
