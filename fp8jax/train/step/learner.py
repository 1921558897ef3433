"""A transformed model, its loss and an optimizer as one step of pure functions, for Linen and NNX.

    learner = make_learner(fp8jax.transform(model, recipe), loss, tx)
    state = learner.init(key, batch)
    state, loss = learner.step(state, batch, key)

`loss(model, batch)` calls `model(*inputs)`. For a Linen model it gets a function that has the variables, for
an NNX model the module. It is a mean over the rows of the batch.
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
    """The state of a training."""

    step: jax.Array  # shape=(), int32: steps done
    variables: Any  # Flax's collections, or the state of an NNX model
    opt_state: Any


class Learner(NamedTuple):
    """Functions to be jitted; `step` may have its state donated."""

    init: Callable[[jax.Array, Any], State]
    restart: Callable[[Any], State]  # from variables
    step: Callable[[State, Any, jax.Array], tuple[State, jax.Array]]
    evaluate: Callable[[Loss, Any, Any], jax.Array]  # (loss, variables, batch); changes nothing
    gradients: Callable[[State, Any, jax.Array], dict[str, Any]]  # of a step, in "params"
    collections: Callable[[Any], dict[str, Any]]  # variables -> trained parameters and scaling state
    report: Callable[[Any], str]  # batch, or its shapes -> which layers run in FP8


def make_learner(model: Any, loss: Loss, tx: Any, *, microbatches: int = 1, zero: Any = None) -> Learner:
    """The functions of a training.

    Args:
        model: from `fp8jax.transform`.
        loss: see this module.
        tx: an optimizer for fp8jax's gradients.
        microbatches: parts of a batch, see `accumulate_gradients`.
        zero: as in `value_and_grad`.
    """
    framework = _Linen(model, loss) if isinstance(model, LinenModel) else _NNX(model, loss)
    parts = microbatches * (1 if zero is None else zero.devices)

    def grad_of(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        if microbatches == 1:
            return adapters.value_and_grad(loss_fn, has_aux=has_aux, zero=zero)
        return adapters.accumulate_gradients(loss_fn, microbatches, has_aux=has_aux, zero=zero)

    def merged(aux: Any) -> Any:
        """The auxiliary outputs of all parts as one: the mean over devices, the last of the microbatches."""
        aux = aux if zero is None else jax.tree.map(_mean, aux)
        return jax.tree.map(lambda x: x[-1], aux) if microbatches > 1 else aux

    def init(key: jax.Array, batch: Any) -> State:
        return restart(framework.init(key, batch))

    def restart(variables: Any) -> State:
        variables = variables if zero is None else framework.placed(variables, zero)
        return State(jnp.zeros((), jnp.int32), variables, tx.init(framework.trained(variables)))

    def loss_and_gradients(state: State, batch: Any, key: jax.Array) -> tuple[jax.Array, Any, Any]:
        keys = jax.random.split(jax.random.fold_in(key, state.step), parts)
        return framework.gradients(grad_of, merged, state.variables, batch, keys)

    def gradients(state: State, batch: Any, key: jax.Array) -> dict[str, Any]:
        return framework.in_params(loss_and_gradients(state, batch, key)[1])

    def step(state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array]:
        loss, grads, variables = loss_and_gradients(state, batch, key)
        updates, opt_state = tx.update(grads, state.opt_state, framework.trained(variables))
        return State(state.step + 1, framework.updated(variables, updates), opt_state), loss

    return Learner(
        init, restart, step, framework.evaluate, gradients, framework.collections, framework.report
    )


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=0, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


class _Linen:
    """A Linen model: collections of variables, and random streams from the key of the step."""

    def __init__(self, model: LinenModel, loss: Loss) -> None:
        self.model, self.loss = model, loss

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

        self.loss(call, batch)
        # Sown collections grow with each call: the loss may read them, but they are not part of the state.
        after = jax.eval_shape(lambda: self._call(variables, batch, key)[1])
        sown = {
            name
            for name, tree in after.items()
            if jax.tree.structure(tree) != jax.tree.structure(variables[name])
        }
        return {name: tree for name, tree in variables.items() if name not in sown}

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

        jax.eval_shape(functools.partial(self.loss, call), batch)
        args, kwargs = _first(calls)
        return str(adapters.report(self.model, *args, rngs={"dropout": None}, **kwargs))

    def _call(self, variables: Mapping[str, Any], batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        """The loss, and the collections that the model changed."""
        kept = [name for name in variables if name not in OURS]
        others: dict[str, Any] = {}

        def call(*args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
            inside = {**variables, **others}
            asked = [mutable] if isinstance(mutable, str) else list(mutable or ())
            rngs = {"dropout": key} if rngs is None else rngs
            out, new = self.model.apply(inside, *args, mutable=[*kept, *asked], rngs=rngs, **kwargs)
            others.update({name: new[name] for name in kept if name in new})
            return out if mutable is False else (out, {name: new[name] for name in asked if name in new})

        return self.loss(call, batch), others


class _NNX:
    """An NNX model: its state, with its own random streams."""

    def __init__(self, model: nnx.Module, loss: Loss) -> None:
        self.graph, self.variables = nnx.split(model)
        self.loss = loss

    def init(self, key: jax.Array, batch: Any) -> Any:
        del key, batch
        return self.variables

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
        loss, grads = grad_of(self.loss, False)(model, batch)
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
            return self.loss(_Recording(nnx.merge(self.graph, variables), calls), batch)

        jax.eval_shape(traced, self.variables, batch)
        args, kwargs = _first(calls)
        return str(adapters.report(nnx.merge(self.graph, self.variables), *args, **kwargs))


class _Recording:
    """A module that records the shapes of its calls."""

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
