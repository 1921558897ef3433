"""`prepare` a model and an optimizer for a recipe, `report` on it, and `dequantize` it."""

import copy
import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import backends, layers
from fp8jax_torch.backends import native
from fp8jax_torch.backends.base import ModuleRow, check_no_hooks, check_no_scheduler
from fp8jax_torch.linear import Converted, restore
from fp8jax_torch.optim.skipping import Skipping
from fp8jax_torch.safetensors_keys import save_as_before, save_in_parts
from fp8jax_torch.scaling import ScalingState

_REPORT, _REPLACED = "_fp8jax_report", "_fp8jax_replaced"


class Report(NamedTuple):
    """The modules with weights, in the model's order; `str` gives a table."""

    recipe: str
    why: str  # the backend, and the reason for its choice
    rows: tuple[ModuleRow, ...]
    note: str = ""

    def __str__(self) -> str:
        gemm = "FP4" if Recipe.parse(self.recipe).gemm == "FP4" else "FP8"
        cells = [("layer", "kind", "weight", gemm)]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            cells.append((row.path or "(root)", row.kind, shape, row.reason or "yes"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:3] + [0]
        lines = ["  ".join(map(str.ljust, line, widths)) for line in cells]
        count = sum(row.fp8 for row in self.rows)
        summary = [f"{self.recipe}: {count} of {len(self.rows)} modules with weights in {gemm}", self.why]
        return "\n".join([*summary, *lines, *([self.note] if self.note else [])])


def prepare(
    model: nn.Module,
    optimizer: Any,
    recipe: Recipe | str,
    backend: str = "auto",
    *,
    inplace: bool = False,
    process_group: Any = None,
) -> tuple[nn.Module, Any]:
    """The model and the optimizer to train with; the training loop does not change. See also `report`.

    Args:
        model: any module with linear layers (`nn.Linear`, transformers' `Conv1D`).
        optimizer: a torch optimizer of the model's parameters, or None. An Adam or AdamW gets moments and
            masters in the recipe's formats, and keeps its groups, options and state. Other optimizers skip
            steps with a gradient that is not finite, and count them in `skipped`.
        recipe: a `Recipe`, or the text of one (`Recipe.parse`).
        backend: "native", "te", "msamp", "torchao" or "auto", see `fp8jax_torch.backends.choose`.
        inplace: whether to change the given model and optimizer instead of copies. In both cases use only the
            returned optimizer, also for schedulers: a step of the given one without gradients raises.
        process_group: of `torch.distributed`, the processes that train the model together; None for all. They
            share the amaxes of delayed scaling, and skip the same steps, so each must call `optimizer.step`.
            Only with backend="native".

    Raises:
        TypeError: `model` is not a module, or `optimizer` not an optimizer.
        ValueError: the recipe cannot be parsed, or the backend cannot express it; the model or a submodule
            was prepared before; a parameter that is copied has hooks; a pattern of the recipe matches no
            layer, or no layer can run in FP8; the optimizer cannot keep the recipe's formats, or has a
            scheduler; the backend has no process group.
        ImportError: the library of the named backend is not installed.
        RuntimeError: the named backend cannot run here, or has no block scaling here.
    """
    recipe = Recipe.parse(recipe)
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model`: expected a torch.nn.Module; got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        got = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(f"`optimizer`: expected a torch.optim.Optimizer or None; got {got.__name__}.")
    for name, module in model.named_modules():
        if hasattr(module, _REPORT) or isinstance(module, Converted):
            within = f" with a {type(module).__name__} in it" if name else ""
            raise ValueError(
                f"`model`: expected a plain model; got a {type(model).__name__}{within} that was prepared "
                "already. Give the original model, or `fp8jax_torch.dequantize(model)` of a native one."
            )
    chosen, why = backends.choose(backend, recipe, layers.device_of(model), model)
    if process_group is not None and chosen is not native:
        raise ValueError(f"`process_group`: only backend='native' takes one; got it with {chosen.NAME!r}.")
    given = optimizer
    if not inplace:
        check_no_hooks(model.named_parameters())
        if optimizer is not None:
            check_no_scheduler(optimizer)
        model, optimizer = _copied(model, optimizer)
    model, optimizer, rows, note = chosen.prepare(model, optimizer, recipe)
    for state in [module for module in model.modules() if isinstance(module, ScalingState)]:
        state.process_group = process_group
    if isinstance(optimizer, Skipping):
        optimizer.process_group = process_group
    if optimizer is not None:
        _warn_of_others(model, optimizer)
    if given is not None and given is not optimizer:
        _copy_hooks(given, optimizer)
        if not hasattr(given, _REPLACED):
            setattr(given, _REPLACED, given.register_step_pre_hook(functools.partial(_refuse_step, inplace)))
    if chosen is native:
        save_in_parts(model)
    setattr(model, _REPORT, Report(str(recipe), why, tuple(rows), note))
    return model, optimizer


def _copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Copies; of the optimizer also the attributes that torch's `__getstate__` leaves out."""
    memo: dict[int, Any] = {}
    model, new = copy.deepcopy((model, optimizer), memo)
    if optimizer is None:
        return model, None
    for name in vars(optimizer).keys() - vars(new).keys() - {_REPLACED, "process_group"}:
        try:
            setattr(new, name, copy.deepcopy(getattr(optimizer, name), memo))
        except Exception as error:
            raise ValueError(
                f"`optimizer`: expected attributes that can be copied; got {name}, which says: {error}. Say "
                "inplace=True."
            ) from error
    return model, new


def _copy_hooks(given: Any, optimizer: Any) -> None:
    """Gives the hooks of the given optimizer, without `_refuse_step`, to the returned optimizer."""
    own = getattr(given, _REPLACED, None)
    for name, hooks in vars(given).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            kept = {key: hook for key, hook in hooks.items() if own is None or key != own.id}
            getattr(optimizer, name).update(kept)


def _warn_of_others(model: nn.Module, optimizer: Any) -> None:
    """Warns of trainable parameters that the optimizer does not train."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    others = [name for name, parameter in trained if id(parameter) not in own]
    if others:
        warnings.warn(
            f"{len(others)} of {len(trained)} trainable parameters of the prepared model are not the "
            f"optimizer's, {others[0]} for one. An optimizer that was made before `prepare` does not move "
            "them: make it of the prepared model, or say requires_grad_(False).",
            stacklevel=3,
        )


def _refuse_step(inplace: bool, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step of the optimizer that `prepare` was given: it does not train the prepared model."""
    grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    if inplace or all(grad is None for grad in grads):
        raise RuntimeError(
            "`optimizer`: expected the one that `prepare` returned; got the one that it was given, which "
            "does not train the prepared model. Say `model, optimizer = prepare(model, optimizer, recipe)`."
        )


def transform(
    model: nn.Module,
    recipe: Recipe | str,
    backend: str = "auto",
    *,
    inplace: bool = False,
    process_group: Any = None,
) -> nn.Module:
    """`prepare` without an optimizer.

    Scaling states advance at the first forward after a backward, so once per microbatch. Over several
    processes they do not advance in evaluation (`model.eval()` and `torch.no_grad()`), which one process may
    run alone.
    `fp8jax_torch.optim.skipping(optimizer)` makes an optimizer skip steps that are not finite.
    """
    return prepare(model, None, recipe, backend, inplace=inplace, process_group=process_group)[0]


def report(model: nn.Module) -> Report:
    """The report of a prepared model: which layers run in FP8, why others do not, and the backend.

    Raises:
        TypeError: `model` was not prepared.
    """
    found = getattr(model, _REPORT, None)
    if found is None:
        raise TypeError(
            f"`model`: expected a model that fp8jax_torch.prepare returned; got a {type(model).__name__} "
            "without a report. If a wrapper is around the model, give the model inside."
        )
    if not found.why.startswith(native.NAME):
        return found
    uncalled = native.uncalled(model)
    rows = [row._replace(reason="not called yet") if row.path in uncalled else row for row in found.rows]
    return found._replace(rows=tuple(rows), note=native.note(model))  # the note depends on the device


def dequantize(model: nn.Module) -> nn.Module:
    """A plain copy of a natively prepared model: plain layers and weights, no scaling state."""
    model = copy.deepcopy(model)
    native.forget_hooks(model)
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, Converted):
            restore(module, plain)
        save_as_before(module)
        if hasattr(module, _REPORT):
            delattr(module, _REPORT)
    return model
