"""MS-AMP: `msamp.initialize` at O1 or O2, its own linear layers or TransformerEngine's.

| recipe                                             | MS-AMP                                               |
|----------------------------------------------------|------------------------------------------------------|
| O1, O2                                             | `initialize(model, optimizer, opt_level)`            |
| te+O2, or O1 and O2 with another gemm column       | TransformerEngine's layers, `use_te=True`            |

MS-AMP runs in FP8 only where the GPU's name contains "h100". Elsewhere it gives no warning, so other GPUs are
refused. Importing MS-AMP replaces `torch.nn.functional.linear` and TransformerEngine's classes, so it is
imported last.
"""

import copy
import importlib
from typing import Any

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import layers
from fp8jax_torch.backends import base, te
from fp8jax_torch.gemm import why_no_fp8

NAME = "msamp"

PACKAGE = base.Package("msamp", "the steps in github.com/Azure/MS-AMP; it is in no package index")

_LEVELS = {("FP32", "FP32"): "O1", ("E4M3", "FP16"): "O2"}

# How MS-AMP's own linear layers choose scales: nn/linear.py, common/tensor/meta.py.
_OWN_SCALING: dict[str, tuple[Any, ...]] = {
    "scaling": ("delayed",),
    "fp8_format": ("HYBRID",),
    "margin": (0,),
    "interval": (1,),
    "amax_history_len": (16,),
    "amax_compute_algo": ("max",),
    "override_linear_precision": ((False, False, False),),
    "first_scale": ("typical", "tensor"),
}


def supports(device: torch.device) -> str | None:
    """None on an H100, else the reason."""
    if reason := why_no_fp8("msamp", device):
        return reason
    name = torch.cuda.get_device_name(device)
    if "h100" not in name.lower():
        return f'msamp runs in FP8 only where the device\'s name has "h100" in it; got {name}'
    return PACKAGE.unusable()


def refuses(recipe: Recipe) -> str | None:
    """The field of the recipe that MS-AMP, with or without TransformerEngine, cannot express; or None."""
    columns = {
        "gemm": ("FP8",),
        "weight": ("FP16",),
        "comm": ("FP8",),
        "master_weight": ("-",),
        "weight_grad": ("E4M3",),
        "moments": tuple(_LEVELS),
        "rounding": (("nearest", "nearest", "value"),),
    }
    if reason := base.refused(NAME, recipe, columns):
        return reason
    if not uses_te(recipe):
        return None
    # The TransformerEngine that MS-AMP is made for, 1.1, has delayed scaling only.
    return base.refused(NAME, recipe, {"scaling": ("delayed",)}) or te.refuses_gemm(NAME, recipe)


def uses_te(recipe: Recipe) -> bool:
    """Whether the gemm column needs TransformerEngine's layers instead of MS-AMP's."""
    return base.refused(NAME, recipe, _OWN_SCALING) is not None


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> base.Prepared:
    """`msamp.initialize` at the recipe's level; see `base`.

    The optimizer is an Adam or AdamW before its first step. It does not change; MS-AMP's optimizer with the
    same groups replaces it. Without one, MS-AMP makes an AdamW with its defaults.

    References:
        MS-AMP 0.4.0, msamp/__init__.py, nn/linear.py, te/replacer.py, optim/.
    """
    if optimizer is not None:
        _check(optimizer)
    # First, since it replaces TransformerEngine's classes.
    msamp = importlib.import_module("msamp")
    use_te, rows = uses_te(recipe), plan(model, recipe)
    if use_te:
        model = te.swap(model, rows)
    else:
        in_fp8 = {row.path for row in rows if row.fp8}
        for path, module in layers.linears(model).items():
            if path not in in_fp8:
                module.use_fp32_linear = True  # pyright: ignore[reportArgumentType]
    level = _LEVELS[recipe.moments]
    model, new = msamp.initialize(
        model, None if optimizer is None else _for_msamp(optimizer), opt_level=level, use_te=use_te
    )
    if isinstance(optimizer, torch.optim.Adam):
        # Since torch 2.7 AdamW is a subclass of Adam, for which MS-AMP looks first; only this field differs.
        new.use_adam = not base.is_decoupled(optimizer)
    if use_te:
        te.run_in_fp8(model, recipe)
    notes = ["across devices, call optimizer.all_reduce_grads(model) before each step"]
    if optimizer is None:
        notes.append("MS-AMP made the optimizer, an AdamW with its defaults")
    if use_te and te.note_on(recipe):
        notes.append(te.note_on(recipe))
    return base.Prepared(model, new, rows, f"MS-AMP {level}: {'; '.join(notes)}")


def plan(model: nn.Module, recipe: Recipe) -> list[base.ModuleRow]:
    """See `base.plan`."""
    use_te, found = uses_te(recipe), layers.linears(model)
    shared = {found[path]: other for path, other in layers.shared_weights(model).items()}
    places = [child for parent in model.modules() for child in parent._modules.values()]

    def why_not(module: nn.Module) -> str | None:
        if module in shared:
            return f"its weight is also the weight of {shared[module]}, and MS-AMP would separate the two"
        if use_te:
            return te.why_not(module)
        if sum(place is module for place in places) > 1:
            return "it is in more than one place of the model, and MS-AMP would make several layers of it"
        return layers.why_not_replaced(module, "MS-AMP")  # pads dimensions

    return base.plan(NAME, model, recipe, why_not, te.other if use_te else base.no_gemm)


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that MS-AMP cannot continue, or that would fail at the first step."""
    base.check_no_scheduler(optimizer)
    got = None
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        got = type(optimizer).__name__
    elif optimizer.state:
        got = 'one that has stepped already. Prepare before the first step, or use backend="native"'
    elif any(group.get("amsgrad") for group in optimizer.param_groups):
        got = "amsgrad=True"
    if got:
        raise ValueError(f"`optimizer`: MS-AMP takes torch.optim.Adam or AdamW; got {got}.")


def _for_msamp(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy for MS-AMP to write to, without the option of newer torch that its optimizers do not have."""
    new = copy.copy(optimizer)
    new.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    new.defaults = {**optimizer.defaults}
    new.defaults.pop("decoupled_weight_decay", None)
    return new
