"""The interface of a transformed model, which is the same for all frameworks.

adapter = adapter_of(model)
variables, inputs = adapter.split(*args)      # of a Linen model: the first argument, and the others
y = adapter.apply(variables, *inputs)
"""

from typing import Any, Protocol

from jaxtyping import PyTree

from fp8jax.adapters import linen, nnx
from fp8jax.adapters.nnx.calls import rewritten_of
from fp8jax.adapters.nnx.model import NNXModel
from fp8jax.rewrite import FunctionModel, Report, Settings


class Adapter(Protocol):
    """A transformed model as a function of variables."""

    @property
    def settings(self) -> Settings:
        """The recipe, rules, GEMM backend and adapters."""
        ...

    def split(self, *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The variables, and the inputs among the arguments of a call."""
        ...

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> PyTree:
        """The call with these variables."""
        ...

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Which layers run in FP8 for these inputs, and why the others do not."""
        ...


def adapter_of(model: Any) -> Adapter:
    """The adapter of a transformed model.

    Raises:
        TypeError: `model` is not transformed.
    """
    if isinstance(model, linen.LinenModel | FunctionModel):
        return model
    if nnx.is_module(model) and rewritten_of(model) is not None:
        return NNXModel(model)
    raise TypeError(f"`model`: expected a model from fp8jax.transform; got {type(model).__name__}.")
