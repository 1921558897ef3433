"""torchao's `Float8Linear` in place of `nn.Linear`, for recipes with `scaling=current`.

Weights, gradients and moments stay in high precision. On a CPU torchao rounds to FP8 and multiplies in
float32.
"""

from typing import Any

import torch
from torch import nn

from fp8jax import formats
from fp8jax.recipe import Recipe
from fp8jax_torch import casts, layers
from fp8jax_torch.backends import base
from fp8jax_torch.matmul import why_no_fp8
from fp8jax_torch.optim.skipping import skipping

NAME = "torchao"

PACKAGE = base.Package("torchao", "pip install torchao")

# Of torch._scaled_mm on a GPU; torchao 0.18.0, Float8LinearConfig.pad_inner_dim.
_MULTIPLE = 16


def supports(device: torch.device) -> str | None:
    """None on a CPU (emulated) and on a GPU with FP8 tensor cores, else the reason."""
    return (device.type != "cpu" and why_no_fp8("torchao", device)) or PACKAGE.unusable("torchao.float8")


def refuses(recipe: Recipe) -> str | None:
    """The field of the recipe that torchao cannot express, or None.

    The fields of delayed scaling (interval, amax_history_len, amax_compute_algo, first_scale) have no meaning
    with scaling=current.
    """
    return base.refused(NAME, recipe, {**base.ONLY_GEMM, "scaling": ("current",), "margin": (0,)})


def plan(model: nn.Module, recipe: Recipe) -> list[base.Row]:
    """See `base.plan`."""
    multiple = 1 if _is_emulated(model) else _MULTIPLE

    def why_not(module: nn.Module) -> str | None:
        return layers.why_not_replaced(module, "torchao", multiple)

    return base.plan(NAME, model, recipe, why_not, base.no_gemm)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> base.Prepared:
    """Replaces the chosen `nn.Linear`s by torchao's layers, with the same parameters; see `base`.

    References:
        torchao 0.18.0, torchao/float8/config.py and float8_linear_utils.py.
    """
    from torchao.float8 import convert_to_float8_training

    emulate, rows, found = _is_emulated(model), plan(model, recipe), layers.linears(model)
    # By identity, since torchao asks about a layer under each of its names.
    chosen = {found[row.path] for row in rows if row.fp8}
    config = _config(recipe, emulate=emulate)
    # torchao replaces a layer in two places of one parent only in the first place.
    while any(module in chosen for module in model.modules()):
        model = convert_to_float8_training(
            model, module_filter_fn=lambda module, name: module in chosen, config=config
        )
    note = "torchao emulates FP8 on the CPU: it rounds as a GPU does, and multiplies in high precision"
    return base.Prepared(model, optimizer and skipping(optimizer), rows, note if emulate else "")


def _is_emulated(model: nn.Module) -> bool:
    return layers.device_of(model).type == "cpu"


def _config(recipe: Recipe, *, emulate: bool) -> Any:
    """The recipe's gemm column as torchao's configuration."""
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    forward, backward = (casts.dtype_of(formats.get(name)) for name in recipe.gemm_formats)

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
