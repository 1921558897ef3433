"""torchao's `Float8Linear` in place of `nn.Linear`: current scaling, parameters as they were.

It scales each operand by its own amax in each step, so a recipe needs `scaling=current`; weights, gradients
and moments stay in full precision. On CPU it multiplies in float32 what it rounded to FP8.
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

# torch._scaled_mm on a GPU takes no others; torchao 0.18.0, Float8LinearConfig.pad_inner_dim.
_MULTIPLE = 16

_DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def supports(device: torch.device | None = None) -> str | None:
    """Why it cannot run on `device`, or None: on CPU (emulated) and on GPUs with FP8 tensor cores it can."""
    device = base.this_device(device)
    reason = None if device.type == "cpu" else base.why_no_fp8_gpu("torchao", device)
    if PACKAGE.missing() is None and reason:
        return reason
    return PACKAGE.unusable("torchao.float8")


def refuses(recipe: Recipe) -> str | None:
    """Which field of the recipe it has nothing for, or None.

    The fields of delayed scaling alone (interval, amax_history_len, amax_compute_algo, first_scale) say
    nothing about a recipe with scaling=current, which is the only one that it has.
    """
    return base.refused(NAME, recipe, {**base.ONLY_GEMM, "scaling": ("current",), "margin": (0,)})


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> base.Prepared:
    """Swaps the chosen `nn.Linear`s for torchao's.

    Args:
        model: changed in place; the parameters stay the same objects.
        optimizer: returned, of a class that skips steps that are not finite.
        recipe: one that `refuses` lets pass.

    Raises:
        ValueError: a pattern of the recipe's matches no layer, or no layer can run in FP8.

    References:
        torchao 0.18.0, torchao/float8/config.py and float8_linear_utils.py.
    """
    from torchao.float8 import convert_to_float8_training

    emulate = layers.device_of(model).type == "cpu"
    reasons, rows = plan(model, recipe)
    found = layers.linears(model)
    # By identity: torchao asks about a layer under each of its names.
    chosen = {found[path] for path, reason in reasons.items() if reason is None}
    config = _config(recipe, emulate=emulate)
    # Again for a layer that stands in two places of one parent: torchao sees the first only.
    while any(module in chosen for module in model.modules()):
        model = convert_to_float8_training(
            model, module_filter_fn=lambda module, name: module in chosen, config=config
        )
    note = "torchao emulates FP8 on the CPU: it rounds as a GPU does, and multiplies in full precision"
    return base.Prepared(model, optimizer and skipping(optimizer), rows, note if emulate else "")


def plan(model: nn.Module, recipe: Recipe) -> tuple[dict[str, str | None], list[base.Row]]:
    """What `prepare` would do to each layer: see `base.plan`."""
    emulate = layers.device_of(model).type == "cpu"
    return base.plan(NAME, model, recipe, lambda module: _unable(module, emulate), base.no_product)


def _config(recipe: Recipe, *, emulate: bool) -> Any:
    """The recipe's gemm column as torchao's configuration."""
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    forward, backward = (_DTYPES[name] for name in recipe.gemm_formats)

    def cast(dtype: torch.dtype, high_precision: bool) -> Any:
        # A new one for each operand, its dtype said: torchao writes into those that do not say it.
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
    """Why torchao cannot take the layer, or None."""
    if layers.is_conv1d(module):
        return "Conv1D keeps its weight as (in, out), and torchao takes nn.Linear only"
    if reason := layers.why_not_swapped(module):
        return reason
    if not emulate and any(size % _MULTIPLE for size in module.weight.shape):
        return f"its dims {list(module.weight.shape)} are not all multiples of {_MULTIPLE}"
    return None
