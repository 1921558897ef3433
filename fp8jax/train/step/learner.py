"""A transformed model, its loss and an optimizer as one step of pure functions, for Linen and NNX.

    learner = Learner(fp8jax.transform(model, recipe), loss, tx)
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
import optax
from flax import nnx

from fp8jax import adapters
from fp8jax.adapters.linen import LinenModel
from fp8jax.adapters.nnx import FP8State
from fp8jax.adapters.nnx.gradient import tree_of
from fp8jax.comm import Zero
from fp8jax.gradients import apply_updates
from fp8jax.variables import OURS, PARAMS, SCALING, has_params

Loss = Callable[[Any, Any], jax.Array]


class State(NamedTuple):
    """The state of a training."""

    step: jax.Array  # shape=(), int32: steps done
    variables: Any  # Flax's collections, or the state of an NNX model
    opt_state: Any


class Learner:
    """The functions of a training, to be jitted; `step` may have its state donated.

    Args:
        model: from `fp8jax.transform`.
        loss: see this module.
        tx: an optimizer for fp8jax's gradients.
        microbatches: parts of a batch, see `accumulate_gradients`.
        zero: as in `value_and_grad`.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        tx: optax.GradientTransformationExtraArgs,
        *,
        microbatches: int = 1,
        zero: Zero | None = None,
    ) -> None:
        self._framework = _Linen(model, loss) if isinstance(model, LinenModel) else _NNX(model, loss)
        self._tx, self._microbatches, self._zero = tx, microbatches, zero
        self.evaluate = self._framework.evaluate  # (loss, variables, batch) -> loss
        self.collections = self._framework.collections  # variables -> trained parameters and scaling state

    def init(self, key: jax.Array, batch: Any) -> State:
        """The first state; of the batch only shapes and dtypes count."""
        return self.restart(self._framework.init(key, batch))

    def restart(self, variables: Any) -> State:
        """The first state with these variables."""
        if self._zero is not None:
            variables = self._framework.placed(variables, self._zero)
        opt_state = self._tx.init(self._framework.trained(variables))
        return State(jnp.zeros((), jnp.int32), variables, opt_state)

    def step(self, state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array]:
        """The next state, and the loss."""
        loss, grads, variables = self._gradients(state, batch, key)
        updates, opt_state = self._tx.update(grads, state.opt_state, self._framework.trained(variables))
        return State(state.step + 1, self._framework.updated(variables, updates), opt_state), loss

    def gradients(self, state: State, batch: Any, key: jax.Array) -> dict[str, Any]:
        """The gradients of a step, in "params"."""
        grads = self._gradients(state, batch, key)[1]
        return {PARAMS: grads[PARAMS] if has_params(grads) else grads}

    def report(self, batch: Any) -> str:
        """Which layers run in FP8, and why the others do not; of the batch only shapes and dtypes count.

        Raises:
            ValueError: the loss does not call the model.
        """
        model, calls = self._framework.calls(batch)
        if not calls:
            raise ValueError(
                "`loss`: expected it to call `model(...)`; it did not, so there is nothing to report."
            )
        args, kwargs = calls[0]
        return str(adapters.report(model, *args, **kwargs))

    def _gradients(self, state: State, batch: Any, key: jax.Array) -> tuple[jax.Array, Any, Any]:
        """The loss, its gradients, and the variables after the forward pass."""
        parts = self._microbatches * (1 if self._zero is None else self._zero.devices)
        keys = jax.random.split(jax.random.fold_in(key, state.step), parts)
        return self._framework.gradients(self._value_and_grad, self._merged, state.variables, batch, keys)

    def _value_and_grad(self, loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        if self._microbatches == 1:
            return adapters.value_and_grad(loss_fn, has_aux=has_aux, zero=self._zero)
        return adapters.accumulate_gradients(loss_fn, self._microbatches, has_aux=has_aux, zero=self._zero)

    def _merged(self, aux: Any) -> Any:
        """The auxiliary outputs of all parts as one: the mean over devices, the last of the microbatches."""
        if self._zero is not None:
            aux = jax.tree.map(_mean, aux)
        return jax.tree.map(lambda x: x[-1], aux) if self._microbatches > 1 else aux


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=0, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


class _Linen:
    """A Linen model: collections of variables, and random streams from the key of the step."""

    def __init__(self, model: LinenModel, loss: Loss) -> None:
        self.model, self.loss = model, loss

    def init(self, key: jax.Array, batch: Any) -> dict[str, Any]:
        variables = self._initialized(key, batch, calls=[])
        # Sown collections grow with each call: the loss may read them, but they are not part of the state.
        after = jax.eval_shape(lambda: self._call(variables, batch, key)[1])
        sown = {
            name
            for name, tree in after.items()
            if jax.tree.structure(tree) != jax.tree.structure(variables[name])
        }
        return {name: tree for name, tree in variables.items() if name not in sown}

    def placed(self, variables: dict[str, Any], zero: Zero) -> dict[str, Any]:
        return zero.place(variables)

    def trained(self, variables: dict[str, Any]) -> dict[str, Any]:
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

    def collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {PARAMS: variables[PARAMS], SCALING: variables.get(SCALING, {})}

    def calls(self, batch: Any) -> tuple[LinenModel, list[Any]]:
        calls: list[Any] = []
        jax.eval_shape(lambda batch: self._initialized(jax.random.key(0), batch, calls), batch)
        return self.model, calls

    def _initialized(self, key: jax.Array, batch: Any, calls: list[Any]) -> dict[str, Any]:
        """New variables; the shapes of the calls of the model are appended to `calls`."""
        variables: dict[str, Any] = {}

        def call(*args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
            calls.append(_shapes((args, {**kwargs, "rngs": {"dropout": None}})))
            if variables:
                return self.model.apply(variables, *args, mutable=mutable, rngs={"dropout": key}, **kwargs)
            streams = {PARAMS: key, "dropout": jax.random.fold_in(key, 1)}
            out, new = self.model.init_with_output(streams, *args, **kwargs)
            variables.update(new)
            return out if mutable is False else (out, {})

        self.loss(call, batch)
        return variables

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

    def placed(self, variables: Any, zero: Zero) -> Any:
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

    def collections(self, variables: Any) -> dict[str, Any]:
        state = tree_of(nnx.state(nnx.merge(self.graph, variables), FP8State))
        return {PARAMS: self.trained(variables), SCALING: state}

    def calls(self, batch: Any) -> tuple[nnx.Module, list[Any]]:
        calls: list[Any] = []

        def traced(variables: Any, batch: Any) -> jax.Array:
            return self.loss(_Recording(nnx.merge(self.graph, variables), calls), batch)

        jax.eval_shape(traced, self.variables, batch)
        return nnx.merge(self.graph, self.variables), calls


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
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree
    )
