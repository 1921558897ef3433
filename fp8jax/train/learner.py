"""A transformed model, its loss and an optimizer as one step of pure functions, be it Linen or NNX.

    learner = learner_of(fp8jax.transform(model, recipe), loss, tx)
    state = learner.init(key, batch)
    state, loss = learner.step(state, batch, key)

`loss(model, batch)` calls `model(*inputs)` as its layers are called: of a Linen model it gets a function that
has the variables, of an NNX model the module. It is a mean over the batch, whose arrays have rows in front.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from fp8jax import adapters
from fp8jax.adapters.linen import LinenModel
from fp8jax.adapters.nnx import FP8State
from fp8jax.adapters.nnx.gradient import tree_of
from fp8jax.gradients import apply_updates
from fp8jax.variables import OURS, PARAMS, SCALING

Loss = Callable[[Any, Any], jax.Array]


class State(NamedTuple):
    """What a step changes."""

    step: jax.Array  # shape=(), int32: how many were taken
    variables: Any  # Flax's collections, or an NNX model's state
    opt_state: Any


class Learner(NamedTuple):
    """Functions to be jitted; `step` may have its state donated."""

    init: Callable[[jax.Array, Any], State]
    restart: Callable[[Any], State]  # of variables
    step: Callable[[State, Any, jax.Array], tuple[State, jax.Array]]
    evaluate: Callable[[Loss, Any, Any], jax.Array]  # another loss, of variables and a batch: no change
    gradients: Callable[[State, Any, jax.Array], dict[str, Any]]  # those of a step, in "params"
    collections: Callable[[Any], dict[str, Any]]  # of variables what is trained, and the scaling state
    report: Callable[[Any], str]  # of a batch, or its shapes: which layers run in FP8


def learner_of(model: Any, loss: Loss, tx: Any, *, microbatches: int = 1, zero: Any = None) -> Learner:
    """How a transformed model learns.

    Args:
        model: what `fp8jax.transform` made.
        loss: see this module.
        tx: an optimizer for fp8jax's gradients.
        microbatches: parts in which the gradient of a batch is taken, see `accumulate_gradients`.
        zero: as in `value_and_grad`.
    """
    kind = _OfLinen(model, loss) if isinstance(model, LinenModel) else _OfNNX(model, loss)
    parts = microbatches * (1 if zero is None else zero.devices)

    def grad_of(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        if microbatches == 1:
            return adapters.value_and_grad(loss_fn, has_aux=has_aux, zero=zero)
        return adapters.accumulate_gradients(loss_fn, microbatches, has_aux=has_aux, zero=zero)

    def merged(aux: Any) -> Any:
        """Auxiliary outputs of all parts as one: of devices the mean, of microbatches the last."""
        aux = aux if zero is None else jax.tree.map(_mean, aux)
        return jax.tree.map(lambda x: x[-1], aux) if microbatches > 1 else aux

    def init(key: jax.Array, batch: Any) -> State:
        return restart(kind.init(key, batch))

    def restart(variables: Any) -> State:
        variables = variables if zero is None else kind.placed(variables, zero)
        return State(jnp.zeros((), jnp.int32), variables, tx.init(kind.trained(variables)))

    def loss_and_gradients(variables: Any, batch: Any, keys: jax.Array) -> tuple[jax.Array, Any, Any]:
        return kind.gradients(grad_of, merged, variables, batch, keys)

    def keys_of(state: State, key: jax.Array) -> jax.Array:
        return jax.random.split(jax.random.fold_in(key, state.step), parts)

    def gradients(state: State, batch: Any, key: jax.Array) -> dict[str, Any]:
        return kind.in_params(loss_and_gradients(state.variables, batch, keys_of(state, key))[1])

    def step(state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array]:
        keys = keys_of(state, key)
        loss, grads, variables = loss_and_gradients(state.variables, batch, keys)
        updates, opt_state = tx.update(grads, state.opt_state, kind.trained(variables))
        return State(state.step + 1, kind.updated(variables, updates), opt_state), loss

    return Learner(init, restart, step, kind.evaluate, gradients, kind.collections, kind.report)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=0, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


class _OfLinen:
    """Collections of variables, and random streams made of the step's key."""

    def __init__(self, model: LinenModel, loss: Loss) -> None:
        self.model, self.loss_fn = model, loss

    def init(self, key: jax.Array, batch: Any) -> dict[str, Any]:
        variables: dict[str, Any] = {}

        def call(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            kwargs.pop("rngs", None)
            if variables:
                return self.model.apply(variables, *args, mutable=mutable, rngs={"dropout": key}, **kwargs)
            rngs = {PARAMS: key, "dropout": jax.random.fold_in(key, 1)}
            out, new = self.model.init_with_output(rngs, *args, **kwargs)
            variables.update(new)
            return out if mutable is False else (out, {})

        self.loss_fn(call, batch)
        # What is sown grows with each call: it is read where it is asked for, and not kept.
        after = jax.eval_shape(lambda: self._call(variables, batch, key)[1])
        kept = {
            name: jax.tree.structure(tree) == jax.tree.structure(variables[name])
            for name, tree in after.items()
        }
        return {name: tree for name, tree in variables.items() if kept.get(name, True)}

    def placed(self, variables: dict[str, Any], zero: Any) -> dict[str, Any]:
        return zero.place(variables)

    def trained(self, variables: Any) -> Any:
        return variables

    def gradients(
        self, grad_of: Any, merged: Any, variables: Mapping[str, Any], batch: Any, keys: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        def loss_fn(variables: Any, batch: Any, keys: jax.Array) -> Any:
            return self._call(variables, batch, keys[0])

        (loss, others), grads = grad_of(loss_fn, True)(variables, batch, keys)
        return loss, grads, {**variables, **merged(others)}

    def updated(self, variables: Any, updates: Any) -> Any:
        return apply_updates(variables, updates)

    def evaluate(self, loss: Loss, variables: Any, batch: Any) -> jax.Array:
        return loss(functools.partial(self.model.apply, variables), batch)

    def in_params(self, grads: Any) -> dict[str, Any]:
        return {PARAMS: grads[PARAMS]}

    def collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {PARAMS: variables[PARAMS], SCALING: variables.get(SCALING, {})}

    def report(self, batch: Any) -> str:
        calls: list[Any] = []

        def call(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            kwargs.pop("rngs", None)
            calls.append(_shapes((args, kwargs)))
            keys = {name: jax.random.key(0) for name in (PARAMS, "dropout")}
            out, _ = self.model.init_with_output(keys, *args, **kwargs)
            return out if mutable is False else (out, {})

        jax.eval_shape(functools.partial(self.loss_fn, call), batch)
        args, kwargs = _first(calls)
        return str(adapters.report(self.model, *args, rngs={"dropout": None}, **kwargs))

    def _call(self, variables: Mapping[str, Any], batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        """The loss, and the collections that it changed."""
        kept = [name for name in variables if name not in OURS]
        others: dict[str, Any] = {}

        def call(*args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
            inside = {**variables, **others}
            asked = [mutable] if isinstance(mutable, str) else list(mutable or ())
            rngs = {"dropout": key} if rngs is None else rngs
            out, new = self.model.apply(inside, *args, mutable=[*kept, *asked], rngs=rngs, **kwargs)
            others.update({name: new[name] for name in kept if name in new})
            return out if mutable is False else (out, {name: new[name] for name in asked if name in new})

        return self.loss_fn(call, batch), others


class _OfNNX:
    """The state of a module, which has random streams of its own."""

    def __init__(self, model: nnx.Module, loss: Loss) -> None:
        self.graph, self.first = nnx.split(model)
        self.loss_fn = loss

    def init(self, key: jax.Array, batch: Any) -> Any:
        del key, batch
        return self.first

    def placed(self, variables: Any, zero: Any) -> Any:
        graph, params, others = nnx.split(nnx.merge(self.graph, variables), nnx.Param, ...)
        return nnx.split(nnx.merge(graph, zero.place(params), others))[1]

    def trained(self, variables: Any) -> Any:
        return nnx.as_pure(nnx.state(nnx.merge(self.graph, variables), nnx.Param))

    def gradients(
        self, grad_of: Any, merged: Any, variables: Any, batch: Any, keys: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        del merged, keys
        model = nnx.merge(self.graph, variables)
        loss, grads = grad_of(self.loss_fn, False)(model, batch)
        return loss, nnx.as_pure(grads), nnx.split(model)[1]

    def updated(self, variables: Any, updates: Any) -> Any:
        model = nnx.merge(self.graph, variables)
        nnx.update(model, apply_updates(nnx.as_pure(nnx.state(model, nnx.Param)), updates))
        return nnx.split(model)[1]

    def evaluate(self, loss: Loss, variables: Any, batch: Any) -> jax.Array:
        return loss(nnx.merge(self.graph, variables), batch)

    def in_params(self, grads: Any) -> dict[str, Any]:
        return {PARAMS: grads}

    def collections(self, variables: Any) -> dict[str, Any]:
        state = tree_of(nnx.state(nnx.merge(self.graph, variables), FP8State))
        return {PARAMS: self.trained(variables), SCALING: state}

    def report(self, batch: Any) -> str:
        calls: list[Any] = []

        def traced(variables: Any, batch: Any) -> jax.Array:
            return self.loss_fn(_Listening(nnx.merge(self.graph, variables), calls), batch)

        jax.eval_shape(traced, self.first, batch)
        args, kwargs = _first(calls)
        return str(adapters.report(nnx.merge(self.graph, self.first), *args, **kwargs))


class _Listening:
    """A module that notes the shapes it is called with."""

    def __init__(self, module: nnx.Module, calls: list[Any]) -> None:
        self._module, self._calls = module, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(_shapes((args, kwargs)))
        return cast(Any, self._module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _shapes(tree: Any) -> Any:
    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x

    return jax.tree.map(shape, tree)


def _first(calls: list[Any]) -> Any:
    if not calls:
        raise ValueError(
            "`loss`: expected it to call `model(...)`; it did not, so there is nothing to report."
        )
    return calls[0]
