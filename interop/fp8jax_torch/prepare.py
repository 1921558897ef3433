"""Preparing a model and an optimizer for a recipe, the report, and the way back."""

import copy
from typing import Any

from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import backends, layers
from fp8jax_torch.backends import native
from fp8jax_torch.linear import is_product, make_plain
from fp8jax_torch.report import Report

_REPORT = "_fp8jax_report"


def prepare(
    model: nn.Module,
    optimizer: Any,
    recipe: Recipe | str,
    backend: str = "auto",
    *,
    inplace: bool = False,
) -> tuple[nn.Module, Any]:
    """The model and the optimizer to train with; the training loop does not change.

    Args:
        model: any module with linear layers (`nn.Linear`, transformers' `Conv1D`).
        optimizer: a torch optimizer of its parameters, or None. An Adam or AdamW becomes one with the
            recipe's moments and masters, with the same groups, options and state. Other optimizers skip steps
            with a gradient that is not finite, and count them in `skipped`.
        recipe: a `Recipe`, or the text of one (`Recipe.parse`).
        backend: "native", "te", "msamp", "torchao" or "auto", see `fp8jax_torch.backends.choose`.
        inplace: whether to change the given model and optimizer; else copies are changed. In both cases use
            only the optimizer that is returned, also for schedulers.

    Returns:
        (model, optimizer). `report(model)` lists the layers in FP8 and the backend.

    Raises:
        TypeError: `model` is no module.
        ValueError: the recipe cannot be parsed, or the backend cannot express it; the model or a part of it
            was prepared before; a pattern of the recipe matches no layer, or no layer can run in FP8; the
            optimizer cannot keep the recipe's formats, or has a scheduler.
        ImportError: the library of the named backend is not installed.
        RuntimeError: the named backend cannot run here.
    """
    recipe = Recipe.parse(recipe)
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model`: expected a torch.nn.Module; got {type(model).__name__}.")
    _refuse_prepared(model)
    chosen, why = backends.choose(backend, recipe, layers.device_of(model), model)
    given = optimizer
    if not inplace:
        model, optimizer = copy.deepcopy((model, optimizer))
    model, optimizer, rows, note = chosen.prepare(model, optimizer, recipe)
    if optimizer is not given and hasattr(getattr(given, "step", None), "_wrapped_by_lr_sched"):
        raise ValueError(
            "`optimizer`: expected one without a scheduler; got one whose scheduler would go on with it, and "
            "not with the optimizer that is returned. Make the scheduler of that one, after `prepare`."
        )
    setattr(model, _REPORT, Report(str(recipe), why, tuple(rows), note))
    return model, optimizer


def _refuse_prepared(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, _REPORT):
            within = f" with a {type(module).__name__} in it" if name else ""
            raise ValueError(
                f"`model`: expected a plain model; got a {type(model).__name__}{within} that was prepared "
                "already. Give the original model, or `fp8jax_torch.dequantize(model)` of a native one."
            )


def transform(
    model: nn.Module, recipe: Recipe | str, backend: str = "auto", *, inplace: bool = False
) -> nn.Module:
    """`prepare` without an optimizer. Scaling states advance at the first forward after a backward, so once
    per microbatch. `fp8jax_torch.optim.skipping(optimizer)` makes torch's optimizers skip steps that are not
    finite."""
    return prepare(model, None, recipe, backend, inplace=inplace)[0]


def report(model: nn.Module) -> Report:
    """The report of a prepared model: its layers in FP8, the reasons for the others, and the backend.

    Raises:
        TypeError: `model` was not prepared.
    """
    found = getattr(model, _REPORT, None)
    if found is None:
        raise TypeError(
            f"`model`: expected what fp8jax_torch.prepare returned; got {type(model).__name__} without a "
            "report. If it was wrapped since, give what is within."
        )
    # The note depends on the present device.
    return found._replace(note=native.note(model)) if found.why.startswith(native.NAME) else found


def dequantize(model: nn.Module) -> nn.Module:
    """A plain copy of a natively prepared model: plain layers and weights, no scaling state."""
    model = copy.deepcopy(model)
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if is_product(module):
            module.weight = make_plain(module, plain)
        if hasattr(module, _REPORT):
            delattr(module, _REPORT)
    return model
