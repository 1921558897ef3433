"""torchao's `Float8Linear` in place of `nn.Linear`, for recipes with `scaling=current`.

Weights, gradients and moments stay in full precision. On a CPU torchao rounds to FP8 and multiplies in
float32.
"""

from typing import Any

import torch
from torch import nn

from fp8jax.recipe import Recipe
from fp8jax_torch import layers
from fp8jax_torch.backends import base
from fp8jax_torch.optim.skipping import skipping

NAME = "torchao"

PACKAGE = base.Package("torchao", "pip install torchao")

# Dimensions for torch._scaled_mm on a GPU; torchao 0.18.0, Float8LinearConfig.pad_inner_dim.
_MULTIPLE = 16

_DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def supports(device: torch.device | None = None) -> str | None:
    """None on a CPU (emulated) and on a GPU with FP8 tensor cores, else the reason."""
    device = base.this_device(device)
    reason = None if device.type == "cpu" else base.why_no_fp8_gpu("torchao", device)
    if PACKAGE.missing() is None and reason:
        return reason
    return PACKAGE.unusable("torchao.float8")


def refuses(recipe: Recipe) -> str | None:
    """The field of the recipe that torchao cannot express, or None.

    The fields of delayed scaling (interval, amax_history_len, amax_compute_algo, first_scale) have no meaning
    with scaling=current.
    """
    return base.refused(NAME, recipe, {**base.ONLY_GEMM, "scaling": ("current",), "margin": (0,)})


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> base.Prepared:
    """Replaces the chosen `nn.Linear`s by torchao's, with the same parameters; see `base`.

    References:
        torchao 0.18.0, torchao/float8/config.py and float8_linear_utils.py.
    """
    from torchao.float8 import convert_to_float8_training

    emulate = layers.device_of(model).type == "cpu"
    reasons, rows = plan(model, recipe)
    found = layers.linears(model)
    # By identity, since torchao asks about a layer under each of its names.
    chosen = {found[path] for path, reason in reasons.items() if reason is None}
    config = _config(recipe, emulate=emulate)
    # Repeated for a layer in two places of one parent, of which torchao sees the first.
    while any(module in chosen for module in model.modules()):
        model = convert_to_float8_training(
            model, module_filter_fn=lambda module, name: module in chosen, config=config
        )
    note = "torchao emulates FP8 on the CPU: it rounds as a GPU does, and multiplies in full precision"
    return base.Prepared(model, optimizer and skipping(optimizer), rows, note if emulate else "")


def plan(model: nn.Module, recipe: Recipe) -> tuple[dict[str, str | None], list[base.Row]]:
    """See `base.plan`."""
    emulate = layers.device_of(model).type == "cpu"
    return base.plan(NAME, model, recipe, lambda module: _unable(module, emulate), base.no_gemm)


def _config(recipe: Recipe, *, emulate: bool) -> Any:
    """The recipe's gemm column as torchao's configuration."""
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    forward, backward = (_DTYPES[name] for name in recipe.gemm_formats)

    def cast(dtype: torch.dtype, high_precision: bool) -> Any:
        # A new object with a dtype for each operand: torchao writes into objects without a dtype.
        scaling = ScalingType.DISABLED if high_precision else ScalingType.DYNAMIC
        return CastConfig(scaling_type=scaling, target_dtype=dtype)

    fprop, dgrad, wgrad = recipe.override_linear_precision
    return Float8LinearConfig(
        cast_config_input=cast(forward, fprop),
        cast_config_weight=cast(forward, fprop),
        cast_config_grad_output=cast(backward, dgrad),
        cast_config_weight_for_grad_input=cast(forward, dgrad),
        cast_config_input_for_grad_weight=cast(forward, wgrad),
        cast_config_grad_output_for_grad_weight=cast(backward, wgrad),
        emulate=emulate,
    )


def _unable(module: Any, emulate: bool) -> str | None:
    """The reason why torchao cannot replace the layer, or None."""
    if layers.is_conv1d(module):
        return "Conv1D keeps its weight as (in, out), and torchao takes nn.Linear only"
    if reason := layers.why_not_swapped(module):
        return reason
    if not emulate and any(size % _MULTIPLE for size in module.weight.shape):
        return f"its dims {list(module.weight.shape)} are not all multiples of {_MULTIPLE}"
    return None
