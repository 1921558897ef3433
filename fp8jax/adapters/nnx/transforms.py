"""The FP8 copy of an NNX module, and back."""

from typing import Any

from flax import nnx

from fp8jax.adapters.nnx.lora import adapt, lora_of, merge, plain_module
from fp8jax.adapters.nnx.module import check_module, with_recipe
from fp8jax.rewrite import Settings


def transform(model: nnx.Module, settings: Settings, inputs: tuple[Any, ...] | None = None) -> nnx.Module:
    """See `fp8jax.transform`."""
    copy = with_recipe(model, settings, inputs)
    if settings.lora is not None:
        adapt(copy, settings, settings.lora)
    return copy


def dequantize(model: nnx.Module) -> nnx.Module:
    """The plain NNX module of a transformed one: its own class, dequantized kernels, no scaling state.

    Adapters are merged into the kernels, see `merge`.

    Raises:
        TypeError: `model` is not an NNX module.
    """
    check_module(model, "dequantize(variables)")
    return plain_module(model) if lora_of(model) is None else merge(model)
