"""TransformerEngine's layers in place of torch's, under its autocast with an equal recipe.

| recipe                                     | TransformerEngine                                         |
|--------------------------------------------|-----------------------------------------------------------|
| scaling=delayed                            | `DelayedScaling(margin, fp8_format, ...)`                 |
| scaling=current                            | `Float8CurrentScaling(fp8_format)`, since 2.2             |
| interval                                   | until 1.7; later versions update in every step            |
| override_linear_precision=False+False+True | until 1.13                                                |

Parameters stay the same objects with the same names, as optimizers and tied embeddings need. A checkpoint of
the plain model loads; a checkpoint of the prepared model also has a key `_extra_state` per layer, with
scales. The context is `autocast(recipe=...)` since 2.9, and `fp8_autocast(fp8_recipe=...)` before.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import layers
from fp8jax_torch.backends import base
from fp8jax_torch.gemm import why_no_fp8
from fp8jax_torch.mixins import mixed
from fp8jax_torch.optim.skipping import skipping

NAME = "te"

PACKAGE = base.Package("transformer_engine", "pip install --no-build-isolation transformer_engine[pytorch]")

# An FP8 GEMM of cuBLASLt needs rows of a multiple of 16 bytes, for the input in the forward and the output
# gradient in the backward. TransformerEngine only checks the weight, for multiples of 8, so its backward
# fails later: 2.18, pytorch/utils.py and common/gemm/cublaslt_gemm.cu.
_MULTIPLE = 16

_NO_OVERRIDE = (False, False, False)
_WGRAD_OVERRIDE = (False, False, True)


def supports(device: torch.device) -> str | None:
    """None on a GPU of compute capability 8.9 or higher, else the reason."""
    return why_no_fp8(PACKAGE.name, device) or PACKAGE.unusable("transformer_engine.pytorch") or _own_reason()


def refuses(recipe: Recipe) -> str | None:
    """The field of the recipe that TransformerEngine cannot express, or None.

    Every `first_scale` is legal: TransformerEngine's first scale is 1, `prepare` notes it, and only the first
    step differs.
    """
    return base.refused(NAME, recipe, base.ONLY_GEMM) or refuses_gemm(NAME, recipe)


def refuses_gemm(name: str, recipe: Recipe) -> str | None:
    """The field of the gemm column that the installed version cannot express, or None.

    Without an installed version the newest version counts. `name` is the backend's.
    """
    old = _installed_default()
    if reason := base.refused(name, recipe, {"scaling": ("delayed", "current")}):
        return reason
    if recipe.scaling == "current":
        if old is not None and not hasattr(_recipes(), "Float8CurrentScaling"):
            return f"{name} has no scaling=current before transformer_engine 2.2"
        only = {"margin": (0,), "override_linear_precision": (_NO_OVERRIDE,)}
        reason = base.refused(name, recipe, only)
        return f"{reason}, with scaling=current" if reason else None
    # 1.8 to 2.1 have an `interval` that nothing reads, with the default -1.
    if recipe.interval != 1 and getattr(old, "interval", -1) < 0:
        return f"{name} has no interval={recipe.interval} since transformer_engine 1.8, only 1"
    can_override = hasattr(old, "override_linear_precision")
    overrides = (_NO_OVERRIDE, _WGRAD_OVERRIDE) if can_override else (_NO_OVERRIDE,)
    reason = base.refused(name, recipe, {"override_linear_precision": overrides})
    return f"{reason}, since transformer_engine 2.0" if reason and not can_override else reason


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> base.Prepared:
    """Replaces `nn.Linear`s and `nn.LayerNorm`s, and runs the model under the autocast; see `base`.

    FP8 is on in every call of the whole model, and off in a call of a submodule: the state of delayed scaling
    advances when a call of the model ends. Recompute activations by `transformer_engine.pytorch.checkpoint`.
    At run time TransformerEngine refuses a number of rows that is not a multiple of 8: exclude such a layer.

    References:
        TransformerEngine 1.0 to 2.18, pytorch/module/linear.py, layernorm.py, fp8.py, quantization.py.
    """
    rows = plan(model, recipe)
    model = swap(model, rows)
    run_in_fp8(model, recipe)
    model.register_load_state_dict_post_hook(_scales_may_be_missing)
    return base.Prepared(model, optimizer and skipping(optimizer), rows, note_on(recipe))


def plan(model: nn.Module, recipe: Recipe) -> list[base.ModuleRow]:
    """See `base.plan`."""
    return base.plan(NAME, model, recipe, why_not, other)


def why_not(module: nn.Module) -> str | None:
    """The reason why `te.Linear` cannot replace the layer, or None."""
    return layers.why_not_replaced(module, "te.Linear", _MULTIPLE)


def swap(model: nn.Module, rows: Sequence[base.ModuleRow]) -> nn.Module:
    """Replaces the linear layers in FP8, and layer norms where possible, by TransformerEngine's."""
    found = layers.linears(model)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    old = [found[row.path] for row in rows if row.fp8] + [norm for norm in norms if not _why_plain_norm(norm)]
    return layers.swap(model, {module: _replaced(module) for module in old})


def run_in_fp8(model: nn.Module, recipe: Recipe) -> None:
    """Runs every call of the model under TransformerEngine's autocast, with an equal recipe."""
    model.te_recipe = _te_recipe(recipe)
    model.__class__ = mixed(UnderAutocast, type(model))


class UnderAutocast:
    """Mixin of a module that is called under TransformerEngine's autocast."""

    te_recipe: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module`."""
        if hasattr(_te(), "autocast"):
            context = _te().autocast(enabled=True, recipe=self.te_recipe)
        else:
            context = _te().fp8_autocast(enabled=True, fp8_recipe=self.te_recipe)
        with context:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def note_on(recipe: Recipe) -> str:
    """How the model differs from the recipe, or ""."""
    if recipe.scaling == "delayed" and recipe.first_scale != "one":
        return f"TransformerEngine's first step has scale 1 (first_scale=one, not {recipe.first_scale})"
    return ""


def _scales_may_be_missing(model: nn.Module, keys: Any) -> None:
    """Lets a checkpoint of the plain model load under `strict`; scales stay as they are."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("_extra_state")]


def _te_recipe(recipe: Recipe) -> Any:
    """The recipe's gemm column as a recipe of TransformerEngine."""
    recipes = _recipes()
    format = recipes.Format[recipe.fp8_format]
    if recipe.scaling == "current":
        return recipes.Float8CurrentScaling(fp8_format=format)
    more: dict[str, Any] = {}
    if recipe.interval != 1:
        more["interval"] = recipe.interval
    if recipe.override_linear_precision != _NO_OVERRIDE:
        # The GEMMs need TransformerEngine's own type; a plain tuple passes the check and fails later.
        default = recipes.DelayedScaling().override_linear_precision
        more["override_linear_precision"] = default._replace(wgrad=True)
    return recipes.DelayedScaling(
        margin=recipe.margin,
        fp8_format=format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        **more,
    )


def _replaced(old: Any) -> nn.Module:
    """TransformerEngine's module in place of a linear layer or a norm, with its parameters."""
    options = {"params_dtype": old.weight.dtype, "device": old.weight.device}
    if isinstance(old, nn.LayerNorm):
        # By position: the first parameter is `hidden_size` in 1.x and `normalized_shape` in 2.x.
        new = _te().LayerNorm(*old.normalized_shape, eps=old.eps, **options)
    else:
        new = _te().Linear(old.in_features, old.out_features, bias=old.bias is not None, **options)
    new.weight = old.weight
    if old.bias is not None:
        new.bias = old.bias
    return new.train(old.training)


def _why_plain_norm(norm: nn.LayerNorm) -> str | None:
    """Why `te.LayerNorm`, with one axis, a weight and a bias, cannot replace a norm; or None."""
    if norm.weight is None or norm.bias is None:
        return "without a bias" if norm.weight is not None else "without a weight"
    if len(norm.normalized_shape) != 1:
        return "over more than one axis"
    if type(norm).forward is not nn.LayerNorm.forward or "forward" in vars(norm):
        return "which overrides forward"
    return "with hooks" if norm._forward_hooks or norm._forward_pre_hooks else None


def other(module: nn.Module) -> str:
    """The reason for a module that is not a linear layer."""
    reason = base.no_gemm(module)
    if not isinstance(module, nn.LayerNorm):
        return reason
    why = _why_plain_norm(module)
    return f"{reason}: nn.LayerNorm still, {why}" if why else f"{reason}: te.LayerNorm"


def _own_reason() -> str | None:
    """TransformerEngine's own reason, from the GPU, CUDA and cuBLASLt; or None."""
    if hasattr(_te(), "is_fp8_available"):
        available, reason = _te().is_fp8_available(return_reason=True)
    else:
        available, reason = importlib.import_module("transformer_engine.pytorch.fp8").check_fp8_support()
    return None if available else f"transformer_engine says: {reason}"


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _recipes() -> Any:
    return importlib.import_module("transformer_engine.common.recipe")


def _installed_default() -> Any:
    """A `DelayedScaling()` of the installed version, or None."""
    return None if PACKAGE.unusable("transformer_engine.common.recipe") else _recipes().DelayedScaling()
