"""The parts that backends share. A backend is a module:

    NAME                                    as in `prepare(backend=...)`
    PACKAGE                                 its library, looked for without importing it
    supports(device) -> reason or None      can it run here?
    refuses(recipe) -> reason or None       can it express the recipe?
    plan(model, recipe) -> rows             what `prepare` would do to each layer, see `plan`
    prepare(model, optimizer, recipe)       the model and the optimizer to train with, as `Prepared`

A reason is one sentence that a user can act on. `prepare` changes the model in place. It raises ValueError
where a pattern of the recipe matches no layer, where no layer can run in FP8, and for an optimizer that
cannot keep the recipe's formats.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax.recipe.legal_values import shown
from fp8jax_torch import layers

# Recipe fields with these values keep FP8 inside the matched layers' GEMMs.
ONLY_GEMM: dict[str, tuple[Any, ...]] = {
    "gemm": ("FP8",),
    "comm": ("FP32",),
    "weight": ("FP32",),
    "master_weight": ("-",),
    "weight_grad": ("FP32",),
    "moments": (("FP32", "FP32"),),
    "rounding": (("nearest", "nearest", "value"),),
}


class ModuleRow(NamedTuple):
    """One module with weights."""

    path: str
    kind: str  # name of the class before `prepare`
    shape: tuple[int, ...]  # of the weight; () without a weight
    reason: str | None  # why the module's GEMMs are not in FP8

    @property
    def fp8(self) -> bool:
        """Whether the module's GEMMs are in FP8."""
        return self.reason is None


class Prepared(NamedTuple):
    """A model and an optimizer to train with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None if none was given, unless the backend makes one
    rows: list[ModuleRow]
    note: str  # for the user; may be empty


class NoLayer(ValueError):
    """A backend can run no layer of the model in FP8."""


class Package(NamedTuple):
    """A library that may be installed, and how to get it."""

    name: str
    install: str

    def missing(self) -> str | None:
        """The reason why the library is not found, without importing it; or None."""
        # For a module without a spec find_spec raises.
        found = sys.modules.get(self.name) or importlib.util.find_spec(self.name)
        return None if found else f"{self.name} is not installed"

    def unusable(self, module: str | None = None) -> str | None:
        """The reason why a module of the library, by default the library, cannot be imported; or None."""
        if self.missing():
            return f"{self.missing()}; get it with {self.install}"
        module = module or self.name
        try:
            importlib.import_module(module)
        except Exception as error:  # a library without its driver or its version of CUDA may raise anything
            return f"{module} is installed but cannot be imported ({error}); reinstall it with {self.install}"
        return None


def refused(name: str, recipe: Recipe, legal: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The first field of the recipe with a value that is not legal, as a reason; or None."""
    for field, values in legal.items():
        got = getattr(recipe, field)
        if got not in values:
            return f"{name} has no {field}={shown(got)}, only {' or '.join(map(shown, values))}"
    return None


def plan(
    name: str,
    model: nn.Module,
    recipe: Recipe,
    why_not: Callable[[nn.Module], str | None],
    other: Callable[[nn.Module], str],
) -> list[ModuleRow]:
    """The rows that `prepare` of the backend `name` would report; the model does not change.

    `why_not` gives the reason why the backend cannot run a linear layer in FP8, or None; `other` the reason
    for another module.

    Raises:
        ValueError: a pattern of the recipe matches no layer.
        NoLayer: no layer would run in FP8.
    """
    reasons = layers.choose(model, recipe, why_not)
    rows = rows_of(model, reasons, other)
    if any(row.fp8 for row in rows):
        return rows
    shown = [row for row in rows if row.path in reasons] or rows
    because = [f"{row.path or row.kind}: {row.reason}" for row in shown] or ["it has no weights"]
    shown = "; ".join(because[:3] + ["..."] * (len(because) > 3))
    raise NoLayer(
        f"{name}: expected a layer that can run in FP8; got none ({shown}). "
        'Use backend="native", or change the recipe\'s patterns.'
    )


def rows_of(
    model: nn.Module, reasons: Mapping[str, str | None], other: Callable[[nn.Module], str]
) -> list[ModuleRow]:
    """The rows of a model, by the reasons of its linear layers and of other modules."""
    return [
        ModuleRow(
            path, type(module).__name__, _shape(module), reasons[path] if path in reasons else other(module)
        )
        for path, module in layers.weighted(model).items()
    ]


def no_gemm(module: nn.Module) -> str:
    """The reason why a module that is not a linear layer is not in FP8."""
    if layers.is_norm(module):
        return "a normalization, not a GEMM"
    return "looked up, not multiplied" if isinstance(module, nn.Embedding) else "not a linear layer"


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the weight decay of an Adam or AdamW is decoupled."""
    by_option = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.AdamW) or by_option


def check_no_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer with a scheduler, where `prepare` returns another optimizer."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "`optimizer`: expected one without a scheduler; got one with a scheduler, which would not act on "
            "the returned optimizer. Make the scheduler of the returned optimizer, after `prepare`."
        )


def check_no_hooks(parameters: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError for named parameters with hooks, which their copies would not have."""
    for name, parameter in parameters:
        hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter.requires_grad and any(hooks):
            raise ValueError(
                "`model`: expected parameters without hooks, which the prepared model's would not have; got "
                f"hooks of {name}. Register them after `prepare`, of the parameters of the model it returns."
            )


def _shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of the weight, or of the first parameter."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight", next(iter(parameters.values()), None))
    is_lazy = isinstance(weight, nn.parameter.UninitializedParameter)
    return () if is_lazy or weight is None else tuple(weight.shape)
