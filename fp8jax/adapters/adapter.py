"""The interface of a transformed model, which is the same for all frameworks, and the table of frameworks.

adapter = adapter_of(model)
variables, inputs = adapter.split(*args)      # of a Linen model: the first argument, and the others
y = adapter.apply(variables, *inputs)

The arguments of `report` and `init_with_inputs` are example inputs, without variables. Those of a function of
parameters begin with its parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flax import nnx as flax_nnx
from jaxtyping import PyTree

from fp8jax.adapters import linen, nnx
from fp8jax.adapters.nnx.calls import rewritten_of
from fp8jax.adapters.nnx.model import NNXModel
from fp8jax.rewrite import FunctionModel, Kernel, Report, Settings


@runtime_checkable
class Adapter(Protocol):
    """A transformed model as a function of variables."""

    @property
    def settings(self) -> Settings:
        """The recipe, rules, GEMM backend and adapters."""
        ...

    def plain(self) -> Any:
        """The model without its recipe and its adapters, for `transform`."""
        ...

    def init_with_inputs(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The first variables, a dict with "params", and the inputs of `apply`, from example inputs."""
        ...

    def split(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The variables, and the inputs among the arguments of a call."""
        ...

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> PyTree:
        """The call with these variables."""
        ...

    def kernels(self, variables: Any, /, *args: Any, **kwargs: Any) -> dict[tuple[str, ...], Kernel]:
        """The kernels that the recipe or a rule applies to, by path."""
        ...

    def freeze(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """The variables with each kernel quantized once to its GEMM's format."""
        ...

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Which layers run in FP8 for these example inputs, and why the others do not."""
        ...


class Framework(NamedTuple):
    """How `transform` and `adapter_of` treat the models of a framework."""

    is_plain: Callable[[Any], bool]  # whether `transform` gets a model of this framework
    transform: Callable[[Any, Settings], Any]  # an NNX module's takes example inputs, too
    is_transformed: Callable[[Any], bool]
    adapter: Callable[[Any], Adapter]
    # `transform(model)` without computing arrays; most compute none
    eval_shape: Callable[[Callable[[Any], Any], Any], Any] = lambda transform, model: transform(model)


def _linen(module: Any, settings: Settings) -> Any:
    return (linen.LinenModel if settings.lora is None else linen.LoRAModel)(module, settings)


def _is_transformed_nnx(model: Any) -> bool:
    return nnx.is_module(model) and rewritten_of(model) is not None


# All but functions of parameters, which `transform` takes last.
FRAMEWORKS: dict[str, Framework] = {
    "nnx": Framework(nnx.is_module, nnx.transform, _is_transformed_nnx, NNXModel, flax_nnx.eval_shape),
    "linen": Framework(
        linen.is_module, _linen, lambda model: isinstance(model, linen.LinenModel), lambda model: model
    ),
}


def framework_of(model: Any) -> str | None:
    """The name of a transformed model's framework; None for a plain model or a function of parameters."""
    return next((name for name, each in FRAMEWORKS.items() if each.is_transformed(model)), None)


def is_transformed(model: Any) -> bool:
    """Whether `adapter_of` gives an adapter of the model."""
    return isinstance(model, FunctionModel) or framework_of(model) is not None


def adapter_of(model: Any) -> Adapter:
    """The adapter of a transformed model.

    Raises:
        TypeError: `model` is not transformed, or the adapter of its framework is not complete.
    """
    if (name := framework_of(model)) is not None:
        adapter = FRAMEWORKS[name].adapter(model)
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"FRAMEWORKS[{name!r}]: expected an adapter with settings, plain, init_with_inputs, split, "
                f"apply, kernels, freeze and report; got {type(adapter).__name__}."
            )
        return adapter
    if isinstance(model, FunctionModel):
        return model
    raise TypeError(f"`model`: expected a model from fp8jax.transform; got {type(model).__name__}.")
