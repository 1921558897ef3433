"""What a backend is: a module with a name, two questions and two actions.

    NAME                                    as the user asks for it
    PACKAGE                                 its library, looked for without importing it
    supports(device) -> reason or None      can it run here?
    refuses(recipe) -> reason or None       can it express the recipe?
    plan(model, recipe)                     what `prepare` would do to each layer, see `plan`
    prepare(model, optimizer, recipe)       the model and the optimizer to train with, as `Prepared`

A reason is one sentence that a user can act on. `prepare` changes the model in place. It raises ValueError
where a pattern of the recipe matches no layer, where no layer can run in FP8, and for an optimizer that
cannot keep the recipe's formats.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import layers

# Compute capability of the first of NVIDIA's GPUs with FP8 tensor cores: Ada 8.9, then Hopper 9.0.
FP8_CAPABILITY = (8, 9)

# Recipe fields with these values keep FP8 inside the matched layers' GEMMs.
ONLY_GEMM: dict[str, tuple[Any, ...]] = {
    "gemm": ("FP8",),
    "comm": ("FP32",),
    "weight": ("FP32",),
    "master_weight": ("-",),
    "weight_grad": ("FP32",),
    "moments": (("FP32", "FP32"),),
}


class Row(NamedTuple):
    """One module with weights of its own."""

    path: str
    kind: str  # its class's name before `prepare`
    shape: tuple[int, ...]  # of its weight; () without a weight
    fp8: bool  # whether its GEMMs are in FP8
    reason: str | None  # why not


class Prepared(NamedTuple):
    """A model and an optimizer to train with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None without a given one, unless the backend makes one
    rows: list[Row]
    note: str  # for the user; "" without one


class NoLayer(ValueError):
    """A backend can run no layer of the model in FP8."""


class Package(NamedTuple):
    """A library that may be installed, and how to get it."""

    name: str
    install: str

    def missing(self) -> str | None:
        """The reason why the library is not found, without importing it; or None."""
        try:
            found = importlib.util.find_spec(self.name)
        except ValueError:  # a module in sys.modules without a spec
            found = True
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


def this_device(device: torch.device | None) -> torch.device:
    """`device`, or this machine's default."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def why_no_fp8_gpu(name: str, device: torch.device) -> str | None:
    """The reason why a device has no FP8 tensor cores for the library `name`, or None."""
    if device.type != "cuda":
        return f"{name} needs a CUDA device; got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        needed, got = (".".join(map(str, c)) for c in (FP8_CAPABILITY, capability))
        return (
            f"{name} needs compute capability {needed} or higher; got {got} "
            f"({torch.cuda.get_device_name(device)})"
        )
    return None


def refused(name: str, recipe: Recipe, legal: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The first field of the recipe with a value that is not legal, as a reason; or None."""
    for field, values in legal.items():
        got = getattr(recipe, field)
        if got not in values:
            return f"{name} has no {field}={_shown(got)}, only {' or '.join(map(_shown, values))}"
    return None


def _shown(value: Any) -> str:
    """A field's value as `Recipe.parse` reads it."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def plan(
    name: str,
    model: nn.Module,
    recipe: Recipe,
    unable: Callable[[nn.Module], str | None],
    other: Callable[[nn.Module], str],
) -> tuple[dict[str, str | None], list[Row]]:
    """What a backend would do to a model, which does not change.

    Args:
        name: of the backend.
        model: any model.
        recipe: with patterns.
        unable: the reason why the backend cannot run a linear layer in FP8, or None.
        other: the reason for a module that is no linear layer.

    Returns:
        For each linear layer's path None if it will run in FP8, else the reason; and the rows.

    Raises:
        ValueError: a pattern of the recipe matches no layer.
        NoLayer: no layer would run in FP8.
    """
    reasons = layers.choose(model, recipe, unable)
    rows = rows_of(model, reasons, other)
    if any(row.fp8 for row in rows):
        return reasons, rows
    linear = [row for row in rows if row.path in reasons]
    because = [f"{row.path or row.kind}: {row.reason}" for row in linear or rows] or ["it has no weights"]
    shown = "; ".join([*because[:3], *["..."] * (len(because) > 3)])
    raise NoLayer(
        f"{name}: expected a layer that can run in FP8; got none ({shown}). "
        'Use backend="native", or change the recipe\'s patterns.'
    )


def rows_of(
    model: nn.Module, reasons: Mapping[str, str | None], other: Callable[[nn.Module], str]
) -> list[Row]:
    """The rows of a model before a backend changes it; the arguments are those of `plan`."""
    return [
        Row(path, type(module).__name__, _shape(module), reason is None, reason)
        for path, module in layers.weighted(model).items()
        for reason in [reasons[path] if path in reasons else other(module)]
    ]


def no_gemm(module: nn.Module) -> str:
    """The reason why a module that is no linear layer is not in FP8."""
    if layers.is_norm(module):
        return "a normalization, not a matrix product"
    return "looked up, not multiplied" if isinstance(module, nn.Embedding) else "not a linear layer"


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the weight decay of an Adam or AdamW is decoupled."""
    by_setting = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.AdamW) or by_setting


def _shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of the weight, or of the first parameter."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight", next(iter(parameters.values()), None))
    is_lazy = isinstance(weight, nn.parameter.UninitializedParameter)
    return () if is_lazy or weight is None else tuple(weight.shape)
