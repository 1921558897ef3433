"""torchao's layers in place of `nn.Linear`.

| scaling       | torchao's layer         | runs on                                          |
|---------------|-------------------------|--------------------------------------------------|
| current       | `Float8Linear`          | compute capability 8.9 or higher, CPU (emulated) |
| mxfp8         | `MXFP8Linear`           | 10.0 or higher, CPU (emulated)                   |
| block_float32 | `Float8BlockwiseLinear` | 9.0 or higher                                    |
| nvfp4         | `NVFP4Linear`           | 10.0 or higher                                   |

Weights, gradients and moments stay in high precision. On a CPU torchao rounds as a GPU does, and multiplies
in float32. The layers of block scaling are prototypes of torchao. On a GPU they give bfloat16. They take
inputs of whole blocks of rows, and keep the input in high precision for the backward, except for
`NVFP4Linear`, which has random bits of its own.
"""

import importlib
from typing import Any

import torch
from torch import nn

from fp8jax import formats
from fp8jax.quantization.blocks import SIGNS
from fp8jax.recipe import Recipe
from fp8jax_torch import casts, layers
from fp8jax_torch.backends import base
from fp8jax_torch.gemm import why_no_fp8
from fp8jax_torch.optim.skipping import skipping

NAME = "torchao"

# For each way to scale blocks torchao's module below `torchao.prototype`, its layer, the multiple of the
# layer's dims, and the compute capability of its first GPU.
_LAYERS = {
    "mxfp8": ("moe_training.mxfp8_linear", "MXFP8Linear", 32, (10, 0)),
    "block_float32": ("blockwise_fp8_training.linear", "Float8BlockwiseLinear", 128, (9, 0)),
    "nvfp4": ("moe_training.nvfp4_training.nvfp4_training", "NVFP4Linear", 128, (10, 0)),
}

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
    legal = {**base.ONLY_GEMM, "gemm": ("FP8", "FP4"), "scaling": ("current", *_LAYERS), "margin": (0,)}
    if recipe.scaling in _LAYERS:
        high = [(False, False, False)] + [(False, False, True)] * (recipe.scaling == "mxfp8")
        legal |= {"fp8_format": ("E4M3",), "override_linear_precision": tuple(high)}
        legal["fp4_options"] = (Recipe.NVFP4.fp4_options,)
    return base.refused(NAME, recipe, legal)


def plan(model: nn.Module, recipe: Recipe) -> list[base.ModuleRow]:
    """See `base.plan`."""
    scaling, is_emulated = recipe.scaling, _is_emulated(model)
    multiple = _LAYERS[scaling][2] if scaling in _LAYERS else 1 if is_emulated else _MULTIPLE

    def why_not(module: nn.Module) -> str | None:
        reason = layers.why_not_replaced(module, "torchao", multiple)
        return reason or (_why_no_blocks(module, scaling) if scaling in _LAYERS else None)

    return base.plan(NAME, model, recipe, why_not, base.no_gemm)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> base.Prepared:
    """Replaces the chosen `nn.Linear`s by torchao's layers, with the same parameters; see `base`.

    References:
        torchao 0.18.0, torchao/float8/config.py and float8_linear_utils.py; the modules of `_LAYERS`.
    """
    emulate, rows, found = _is_emulated(model), plan(model, recipe), layers.linears(model)
    # By identity, since torchao asks about a layer under each of its names.
    chosen = {found[row.path] for row in rows if row.fp8}
    if recipe.scaling in _LAYERS:
        new = {module: _replaced(module, recipe, emulate=emulate) for module in chosen}
        model = layers.swap(model, new)
    else:
        model = _with_float8(model, chosen, _config(recipe, emulate=emulate))
    note = "torchao emulates FP8 on the CPU: it rounds as a GPU does, and multiplies in high precision"
    return base.Prepared(model, optimizer and skipping(optimizer), rows, note if emulate else "")


def _with_float8(model: nn.Module, chosen: set[nn.Module], config: Any) -> nn.Module:
    """The model with `Float8Linear`s."""
    from torchao.float8 import convert_to_float8_training

    # torchao replaces a layer in two places of one parent only in the first place.
    while any(module in chosen for module in model.modules()):
        model = convert_to_float8_training(
            model, module_filter_fn=lambda module, name: module in chosen, config=config
        )
    return model


def _why_no_blocks(module: Any, scaling: str) -> str | None:
    """The reason why a layer of block scaling cannot replace a linear layer here, or None."""
    path, name, _, capability = _LAYERS[scaling]
    weight = module.weight
    if scaling != "mxfp8" or weight.device.type != "cpu":
        if reason := why_no_fp8(name, weight.device, capability):
            return reason
        if weight.dtype != torch.bfloat16:
            return f"{name} computes in bfloat16, and its weight is {weight.dtype}"
    if scaling == "block_float32" and module.bias is not None:
        return f"{name} has no bias"
    return PACKAGE.unusable(f"torchao.prototype.{path}")


def _replaced(old: Any, recipe: Recipe, *, emulate: bool) -> nn.Module:
    """torchao's layer of block scaling in place of a linear layer, with its parameters."""
    module, name, *_ = _LAYERS[recipe.scaling]
    layer = getattr(importlib.import_module(f"torchao.prototype.{module}"), name)
    if recipe.scaling == "block_float32":
        new = layer.from_float(old)
    elif recipe.scaling == "nvfp4":
        new = layer.from_linear(old, rht_sign_vector=SIGNS.astype(int).tolist())
    else:
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        new = layer(
            *(old.in_features, old.out_features, old.bias is not None),
            kernel_preference=KernelPreference.EMULATED if emulate else KernelPreference.AUTO,
            wgrad_with_hp=recipe.override_linear_precision[2],
            device="meta",
        )
        new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


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
