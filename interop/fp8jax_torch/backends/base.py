"""What a backend is: a module with a name, two questions and one action.

    NAME                                    how the user asks for it
    supports(device) -> reason or None      can it run here?
    refuses(recipe) -> reason or None       can it express the recipe?
    prepare(model, optimizer, recipe)       the model and the optimizer to train with, as `Prepared`

A reason is one sentence that a user can act on. A backend for a library of others also has PACKAGE, so
that the library is looked for without being imported (some change torch when they are), and
`plan(model, recipe)`, what `prepare` would do to each layer.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import layers

# Of NVIDIA's GPUs, those from which on there are FP8 tensor cores: Ada 8.9, Hopper 9.0.
FP8_CAPABILITY = (8, 9)

# Recipe fields that are the same in all recipes whose FP8 stays inside the matched layers' GEMMs.
ONLY_GEMM: dict[str, tuple[Any, ...]] = {
    "gemm": ("FP8",),
    "comm": ("FP32",),
    "weight": ("FP32",),
    "master_weight": ("-",),
    "weight_grad": ("FP32",),
    "moments": (("FP32", "FP32"),),
}


class Row(NamedTuple):
    """What happened to one module that has weights of its own.

    Attributes:
        path: its name in `named_modules()` with "/" for the dots.
        kind: its class's name, as it was before.
        shape: its weight's shape as torch keeps it; () without any weight.
        fp8: whether its matrix products are in FP8.
        reason: why not, or None.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    fp8: bool
    reason: str | None


class Prepared(NamedTuple):
    """What to train with.

    Attributes:
        model: runs in FP8 when it is called.
        optimizer: of that model's parameters; None if none was given and the backend needs none of its own.
        rows: one for every module that has weights of its own.
        note: what the user should know besides, "" if nothing.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    rows: list[Row]
    note: str


class NoLayer(ValueError):
    """Nobody asks for FP8 to get none: a backend can take no layer of the model."""


class Package(NamedTuple):
    """A library that may be installed, and how to get it."""

    name: str
    install: str

    def missing(self) -> str | None:
        """Why it cannot be imported, as far as can be said without importing it; or None."""
        try:
            found = importlib.util.find_spec(self.name)
        except ValueError:  # it was put into sys.modules by hand, without a spec
            found = True
        return None if found else f"{self.name} is not installed"

    def unusable(self, module: str | None = None) -> str | None:
        """Why `module` of it, by default itself, cannot be imported, with what to do; or None."""
        if self.missing():
            return f"{self.missing()}; get it with {self.install}"
        module = module or self.name
        try:
            importlib.import_module(module)
        # A library that finds no driver, or not its own version of CUDA, raises what it likes.
        except Exception as error:
            return f"{module} is installed but cannot be imported ({error}); reinstall it with {self.install}"
        return None


def this_device(device: torch.device | None) -> torch.device:
    """`device`, or the one that a model would be trained on here."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def why_no_fp8_gpu(name: str, device: torch.device) -> str | None:
    """Why a device has no FP8 tensor cores for the library `name`, or None."""
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
    """The first field of the recipe whose value is not among the legal ones, as a reason."""
    for field, values in legal.items():
        got = getattr(recipe, field)
        if got not in values:
            return f"{name} has no {field}={shown(got)}, only {' or '.join(map(shown, values))}"
    return None


def shown(value: Any) -> str:
    """A field's value as `Recipe.parse` reads it."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def plan(
    name: str,
    model: nn.Module,
    recipe: Recipe,
    unable: Callable[[nn.Module], str | None],
    other: Callable[[nn.Module], str],
) -> tuple[dict[str, str | None], list[Row]]:
    """What a backend would do to a model, which stays as it is.

    Args:
        name: the backend's.
        model: any model.
        recipe: whose patterns choose.
        unable: why the backend cannot run a linear layer in FP8, or None.
        other: what to say of a module that is no linear layer.

    Returns:
        By path of each linear layer None if it will run in FP8, else why not; and the rows.

    Raises:
        ValueError: a pattern of the recipe's matches no layer.
        NoLayer: not one layer would run in FP8.
    """
    reasons = layers.choose(model, recipe, unable)
    rows = rows_of(model, reasons, other)
    check_any(name, rows)
    return reasons, rows


def rows_of(
    model: nn.Module, reasons: Mapping[str, str | None], other: Callable[[nn.Module], str]
) -> list[Row]:
    """The rows of a model before a backend changes it; the arguments are what `plan` says."""
    return [
        Row(path, type(module).__name__, _shape(module), reason is None, reason)
        for path, module in layers.weighted(model).items()
        for reason in [reasons[path] if path in reasons else other(module)]
    ]


def check_any(name: str, rows: list[Row]) -> None:
    """Raises NoLayer if no row is in FP8."""
    if any(row.fp8 for row in rows):
        return
    linear = [row for row in rows if "Linear" in row.kind or "Conv1D" in row.kind]
    because = [f"{row.path or row.kind}: {row.reason}" for row in linear or rows]
    because = [*because[:3], "..."] if len(because) > 3 else because or ["it has no weights"]
    raise NoLayer(
        f"{name}: expected a layer that can run in FP8; got none ({'; '.join(because)}). "
        'Use backend="native", or change the recipe\'s patterns.'
    )


def no_product(module: nn.Module) -> str:
    """Why a module that is no linear layer is not in FP8."""
    if layers.is_norm(module):
        return "a normalization, not a matrix product"
    if isinstance(module, nn.Embedding):
        return "looked up, not multiplied"
    return "not a linear layer"


def _shape(module: nn.Module) -> tuple[int, ...]:
    """The weight's, or the first parameter's."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight", next(iter(parameters.values()), None))
    if isinstance(weight, nn.parameter.UninitializedParameter) or weight is None:
        return ()
    return tuple(weight.shape)
