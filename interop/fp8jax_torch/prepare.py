"""What a user calls: a model and an optimizer go in, those to train with come out."""

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
    """The model and the optimizer to train with; the loop stays as it is.

    Args:
        model: any module; its linear layers (`nn.Linear`, transformers' `Conv1D`) take part.
        optimizer: a torch optimizer of its parameters, or None. An Adam or AdamW is replaced by one that
            keeps the recipe's moments and masters; its groups, options and state are carried over. Any other
            skips steps along gradients that are not finite, and counts them in `skipped`, as ours does.
        recipe: a `Recipe`, or the text of one (`Recipe.parse`).
        backend: "native", "te", "msamp" or "torchao"; "auto" is MS-AMP if it is installed, else
            TransformerEngine if it can run here, else native, each only if it can express the recipe.
        inplace: whether the given model is changed; else a copy of it and of the optimizer is. Of the given
            optimizer nothing is to be used afterwards either way, and schedulers are to be made for the one
            returned.

    Returns:
        (model, optimizer). `report(model)` says what runs in FP8, and who multiplies.

    Raises:
        ValueError: the recipe cannot be parsed or the backend cannot express it; the model, or one in it, was
            prepared already; a pattern of the recipe's matches no layer, or no layer can run in FP8; an
            optimizer that cannot keep what the recipe says, or that a scheduler was made of.
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
    """The model alone, see `prepare`. Its scaling states advance where a forward follows a backward: with
    gradient accumulation once per microbatch. An optimizer of torch's takes steps that are not finite;
    `fp8jax_torch.optim.skipping(optimizer)` skips them."""
    return prepare(model, None, recipe, backend, inplace=inplace)[0]


def report(model: nn.Module) -> Report:
    """What runs in FP8 of a prepared model, what does not and why, and who multiplies.

    Raises:
        TypeError: `model` was not prepared.
    """
    found = getattr(model, _REPORT, None)
    if found is None:
        raise TypeError(
            f"`model`: expected what fp8jax_torch.prepare returned; got {type(model).__name__} without a "
            "report. If it was wrapped since, give what is within."
        )
    # Where it is now decides who multiplies.
    return found._replace(note=native.note(model)) if found.why.startswith(native.NAME) else found


def dequantize(model: nn.Module) -> nn.Module:
    """A plain copy of a natively prepared model: its own layers again, weights of their values, no scaling
    state."""
    model = copy.deepcopy(model)
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if is_product(module):
            module.weight = make_plain(module, plain)
        if hasattr(module, _REPORT):
            delattr(module, _REPORT)
    return model
