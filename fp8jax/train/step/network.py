"""A transformed model and its loss as pure functions of variables, for Linen and NNX.

    network = network_of(fp8jax.transform(model, recipe), loss)
    variables = network.init(key, batch)
    loss, grads, variables = network.gradients(variables, batch, key)

`loss(model, batch)` calls `model(*inputs)`. For a Linen model it gets a function that has the variables, for
an NNX model the module. It is a mean over the rows of the batch.
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import errors, nnx
from flax import linen as nn
from jaxtyping import Array, Float, Int32, PRNGKeyArray, PyTree

from fp8jax import adapters
from fp8jax.adapters.adapter import adapter_of, framework_of
from fp8jax.adapters.linen import LinenModel
from fp8jax.adapters.linen.model import check_same, leaves_of
from fp8jax.adapters.nnx import FP8State
from fp8jax.adapters.nnx.module import placed_kernels
from fp8jax.adapters.nnx.variables import tree_of
from fp8jax.comm import Zero
from fp8jax.gradients import apply_updates
from fp8jax.inspect.numerics import Statistics, statistics
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Kernel
from fp8jax.train.step.inputs import Recording, call_shapes, checked, streams
from fp8jax.variables import OURS, PARAMS, SCALING

Loss = Callable[[Any, PyTree], Float[Array, ""]]
# Flax's errors of a call that reaches variables that there are not.
_MISSING = (
    errors.ScopeParamNotFoundError,
    errors.ScopeCollectionNotFound,
    errors.ScopeVariableNotFoundError,
)


class RunState(NamedTuple):
    """The state of a run."""

    step: Int32[Array, ""]  # steps done
    variables: PyTree  # Flax's collections, or the state of an NNX model
    opt_state: PyTree


def network_of(
    model: Any, loss: Loss, microbatches: int = 1, zero: Zero | None = None, plain: Any = None
) -> "_Linen | _NNX":
    """The functions of a model and its loss.

    Args:
        model: from `fp8jax.transform`.
        loss: see this module.
        microbatches: parts of a batch, see `accumulate_gradients`.
        zero: as in `value_and_grad`.
        plain: the untransformed module, for `plain_params`; None without master weights.

    Raises:
        TypeError: the model is not transformed, of another framework, or a function of parameters.
    """
    adapter_of(model)  # raises for a model that is not transformed
    name = framework_of(model)
    if name not in NETWORKS:
        got = "a function of parameters" if name is None else f"a model of {name}"
        raise TypeError(
            f"`model`: fp8jax.train expects a Flax module, Linen or NNX; got {got}. Write your own training "
            "loop with fp8jax.value_and_grad."
        )
    return NETWORKS[name](model, loss, microbatches, zero, plain)


class _Network:
    """The part that is the same for Linen and NNX."""

    def __init__(self, loss: Loss, microbatches: int, zero: Zero | None) -> None:
        self.loss, self.microbatches, self.zero = checked(loss, "loss"), microbatches, zero

    def on_one_device(self) -> Any:
        """The same functions without ZeRO."""
        other = copy.copy(self)
        other.zero = None
        return other

    def _value_and_grad(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        if self.microbatches == 1:
            return adapters.value_and_grad(loss_fn, has_aux=has_aux, zero=self.zero)
        return adapters.accumulate_gradients(loss_fn, self.microbatches, has_aux=has_aux, zero=self.zero)

    def _report(self, model: Any, calls: list[Any], **options: Any) -> str:
        if not calls:
            raise ValueError(
                "`loss`: expected it to call `model(...)`; it did not, so there is nothing to report."
            )
        args, kwargs = calls[0]
        return str(adapters.report(model, *args, **kwargs, **options))


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=0, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


class _Linen(_Network):
    """A Linen model: collections of variables, and random streams from the key of the step."""

    def __init__(
        self, model: LinenModel, loss: Loss, microbatches: int, zero: Zero | None, plain: nn.Module | None
    ) -> None:
        super().__init__(loss, microbatches, zero)
        del plain  # `model` has it
        self.model = model

    def init(self, key: PRNGKeyArray, batch: PyTree) -> dict[str, Any]:
        """New variables; of the batch only shapes and dtypes count."""
        variables = self._initialized(key, batch, [], self.model)
        # Sown collections grow with each call: the loss may read them, but they are not part of the state.
        after = jax.eval_shape(lambda: self._call(variables, batch, key)[1])
        sown = {
            name
            for name, tree in after.items()
            if jax.tree.structure(tree) != jax.tree.structure(variables[name])
        }
        return {name: tree for name, tree in variables.items() if name not in sown}

    def plain_params(self, key: PRNGKeyArray, batch: PyTree) -> Any:
        """The parameters of the untransformed model that `init` rounds to the recipe's formats."""
        return self._initialized(key, batch, [], self.model.plain())[PARAMS]

    def from_plain(self, plain: Mapping[str, Any], like: dict[str, Any]) -> dict[str, Any]:
        """The variables of the untransformed module, with the collections, formats and dtypes of `like`."""
        variables = self.model.quantize(plain, like)
        found = {}
        for name in like:
            sources, targets = leaves_of("plain", variables, name), leaves_of("like", like, name)
            check_same("plain", sources, targets, "the model")
            cast = [_cast(path, sources[path], target) for path, target in targets.items()]
            found[name] = jax.tree.structure(like[name], is_leaf=is_scaled).unflatten(cast)
        return found

    def placed(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The variables as ZeRO shards them."""
        return variables if self.zero is None else self.zero.place(variables)

    def trained(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The part of the variables that the optimizer gets."""
        return variables[PARAMS]

    def gradients(
        self, variables: PyTree, batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], PyTree, PyTree]:
        """The loss, its gradients, and the variables after the forward pass."""
        keys = jax.random.split(key, self.microbatches * (1 if self.zero is None else self.zero.devices))

        def loss_fn(variables: PyTree, batch: PyTree, keys: jax.Array) -> Any:
            return self._call(variables, batch, keys[0])

        (loss, others), grads, variables = self._value_and_grad(loss_fn, has_aux=True)(variables, batch, keys)
        # Of the parts of a batch: the mean over the devices, and the last of the microbatches.
        others = others if self.zero is None else jax.tree.map(_mean, others)
        others = others if self.microbatches == 1 else jax.tree.map(lambda x: x[-1], others)
        return loss, grads, {**variables, **others}

    def updated(self, variables: PyTree, updates: PyTree) -> Any:
        """The variables after an optimizer step."""
        return apply_updates(variables, updates)

    def evaluate(self, loss: Loss, variables: PyTree, batch: PyTree) -> Float[Array, ""]:
        """The loss of a batch by another loss function; the variables stay as they are."""
        return checked(loss, "validation_loss")(functools.partial(self.model.apply, variables), batch)

    def statistics(self, variables: PyTree, batch: PyTree, recipes: Iterable[Recipe]) -> Statistics:
        """Statistics of the operands of the loss under these recipes, see `fp8jax.statistics`."""
        loss_fn = lambda variables, batch: self._call(variables, batch, jax.random.key(0))[0]  # noqa: E731
        return statistics(loss_fn, recipes)(variables, batch)

    def collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The trained parameters and the scaling state."""
        return {PARAMS: variables[PARAMS], SCALING: variables.get(SCALING, {})}

    def report(self, batch: PyTree) -> str:
        """Which layers run in FP8, and why the others do not.

        Raises:
            ValueError: the loss does not call the model.
        """
        calls: list[Any] = []
        jax.eval_shape(lambda batch: self._initialized(jax.random.key(0), batch, calls, self.model), batch)
        return self._report(self.model, calls, rngs={"dropout": None})

    def kernels(self, batch: PyTree) -> dict[tuple[str, ...], Kernel]:
        """The kernels that the recipe or a rule applies to, by path; {} if no model is called."""
        calls: list[Any] = []
        key = jax.random.key(0)
        variables = jax.eval_shape(lambda batch: self._initialized(key, batch, calls, self.model), batch)
        if not calls:
            return {}
        args, kwargs = calls[0]
        own = [name for name in variables if name not in OURS]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # `init` has warned
            return self.model.kernels(variables, *args, **kwargs, rngs=streams(key), mutable=own)

    def _initialized(self, key: PRNGKeyArray, batch: PyTree, calls: list[Any], model: Any) -> dict[str, Any]:
        """New variables of the model, or of the plain module; appends the shapes of its calls to `calls`."""
        variables: dict[str, Any] = {}

        def call(*args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
            calls.append(call_shapes((args, kwargs)))
            if variables:
                try:
                    return model.apply(variables, *args, mutable=mutable, rngs=streams(key), **kwargs)
                except _MISSING as error:
                    others = str(error).partition(" (http")[0]
                    raise ValueError(
                        "`loss`: expected its first call of the model to reach all variables; a later call "
                        f"reaches others: {others} Write a method of the module that makes all calls, and "
                        "call that: model(..., method=...)."
                    ) from None
            first = {PARAMS: key, "dropout": jax.random.fold_in(key, 1)}
            out, new = model.init_with_output(first, *args, **kwargs)
            variables.update(new)
            return out if mutable is False else (out, {})

        self.loss(call, batch)
        return variables

    def _call(
        self, variables: Mapping[str, Any], batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], PyTree]:
        """The loss, and the collections that the model changed."""
        changeable = [name for name in variables if name not in OURS]
        others: dict[str, Any] = {}
        numbers = itertools.count()

        def call(*args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
            inside = {**variables, **others}
            asked = [mutable] if isinstance(mutable, str) else list(mutable or ())
            rngs = streams(key, next(numbers)) if rngs is None else rngs
            out, new = self.model.apply(inside, *args, mutable=[*changeable, *asked], rngs=rngs, **kwargs)
            others.update({name: new[name] for name in changeable if name in new})
            return out if mutable is False else (out, {name: new[name] for name in asked if name in new})

        return self.loss(call, batch), others


def _cast(path: str, x: Any, like: Any) -> Any:
    """A number or an array in the dtype of `like`; raises ValueError where a float would be an integer."""
    if is_scaled(like):
        return x
    array = jnp.asarray(x)
    if jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(like.dtype, jnp.floating):
        raise ValueError(f"`plain`: expected {like.dtype} at {path!r}; got {array.dtype}.")
    return array.astype(like.dtype)


class _NNX(_Network):
    """An NNX model: its state, with its own random streams. The methods are those of `_Linen`."""

    def __init__(
        self, model: nnx.Module, loss: Loss, microbatches: int, zero: Zero | None, plain: nnx.Module | None
    ) -> None:
        super().__init__(loss, microbatches, zero)
        self.graph, self.variables = nnx.split(model)
        # In the memory of the host.
        self._plain = None if plain is None else jax.device_get(nnx.as_pure(nnx.state(plain, nnx.Param)))

    def init(self, key: PRNGKeyArray, batch: PyTree) -> Any:
        del key, batch
        return self.variables

    def plain_params(self, key: PRNGKeyArray, batch: PyTree) -> Any:
        del key, batch
        return self._plain

    def from_plain(self, plain: PyTree, like: PyTree) -> Any:
        raise TypeError(
            f"`plain`: expected None, for an NNX module brings its parameters; got a {type(plain).__name__}. "
            "Call nnx.update(module, parameters) before you give the module to Trainer."
        )

    def placed(self, variables: PyTree) -> Any:
        if self.zero is None:
            return variables
        graph, params, others = nnx.split(self._module(variables), nnx.Param, ...)
        return nnx.split(nnx.merge(graph, self.zero.place(params), others))[1]

    def trained(self, variables: PyTree) -> Any:
        return nnx.as_pure(nnx.state(self._module(variables), nnx.Param))

    def gradients(
        self, variables: PyTree, batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], PyTree, PyTree]:
        del key
        model = self._module(variables)
        loss, grads = self._value_and_grad(self.loss)(model, batch)
        return loss, nnx.as_pure(grads), nnx.split(model)[1]

    def updated(self, variables: PyTree, updates: PyTree) -> Any:
        model = self._module(variables)
        nnx.update(model, apply_updates(nnx.as_pure(nnx.state(model, nnx.Param)), updates))
        return nnx.split(model)[1]

    def evaluate(self, loss: Loss, variables: PyTree, batch: PyTree) -> Float[Array, ""]:
        return checked(loss, "validation_loss")(self._module(variables), batch)

    def statistics(self, variables: PyTree, batch: PyTree, recipes: Iterable[Recipe]) -> Statistics:
        return statistics(self.loss, recipes)(self._module(variables), batch)

    def collections(self, variables: PyTree) -> dict[str, Any]:
        state = tree_of(nnx.state(self._module(variables), FP8State))
        return {PARAMS: self.trained(variables), SCALING: state}

    def report(self, batch: PyTree) -> str:
        calls: list[Any] = []

        def traced(variables: PyTree, batch: PyTree) -> Float[Array, ""]:
            return self.loss(Recording(self._module(variables), calls), batch)

        jax.eval_shape(traced, self.variables, batch)
        return self._report(self._module(self.variables), calls)

    def kernels(self, batch: PyTree) -> dict[tuple[str, ...], Kernel]:
        del batch
        return {path: kernel for path, kernel, _ in placed_kernels(self._module(self.variables))}

    def _module(self, variables: PyTree) -> Any:
        return nnx.merge(self.graph, variables)


# By the names of `adapters.adapter.FRAMEWORKS`.
NETWORKS: dict[str, type[_Linen] | type[_NNX]] = {"linen": _Linen, "nnx": _NNX}
