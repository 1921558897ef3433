"""Linear layers under a recipe: the user's modules with another `forward`.

A layer keeps its name, its parameters' names and its class as a base class, so `isinstance(layer, nn.Linear)`
stays true.
"""

from typing import Any

import torch
from torch import nn

from fp8jax import formats
from fp8jax.recipe import Recipe
from fp8jax_torch import casts
from fp8jax_torch.mixins import Mixin, mixed, unmixed
from fp8jax_torch.product import multiply, without_autocast
from fp8jax_torch.scaled import is_scaled, value
from fp8jax_torch.scaling import ScalingState


class FP8Product(Mixin):
    """Mixin of an `nn.Linear` or a Conv1D: multiplies in FP8; `fp8` is its scaling state."""

    in_out: bool  # whether the weight's shape is (in, out)
    fp8: ScalingState

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight + bias`, shape=(..., out)."""
        dtype = _dtype_of_output(self, x)
        out = multiply(x, self.weight, self.fp8, in_out=self.in_out, dtype=dtype)
        return out if self.bias is None else out + self.bias.to(dtype)


class HighProduct(Mixin):
    """Mixin of an `nn.Linear` or a Conv1D: multiplies in the high-precision format `gemm`."""

    in_out: bool
    gemm: str

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight + bias`, shape=(..., out)."""
        dtype, gemm = _dtype_of_output(self, x), casts.dtype_of(formats.get(self.gemm))
        with without_autocast(x.device):
            weight = value(self.weight).to(gemm)
            out = (x.to(gemm) @ (weight if self.in_out else weight.t())).to(dtype)
        return out if self.bias is None else out + self.bias.to(dtype)


def make_product(layer: Any, recipe: Recipe, in_out: bool) -> None:
    """Changes the class of a plain layer to one that follows the recipe."""
    layer.in_out = in_out
    if recipe.gemm == "FP8":
        layer.fp8 = ScalingState(recipe, layer.weight.device)
        layer.__class__ = mixed(FP8Product, type(layer))
    else:
        layer.gemm = recipe.gemm
        layer.__class__ = mixed(HighProduct, type(layer))


def make_plain(layer: Any, plain: dict[int, nn.Parameter]) -> nn.Parameter:
    """Undoes `make_product`; returns the plain weight. `plain` maps ids of scaled weights to plain ones."""
    for name in ("in_out", "fp8", "gemm"):
        if hasattr(layer, name):
            delattr(layer, name)
    layer.__class__ = unmixed(type(layer))
    weight = layer.weight
    if not is_scaled(weight):
        return weight
    return plain.setdefault(id(weight), nn.Parameter(value(weight.detach()), weight.requires_grad))


def is_product(module: nn.Module) -> bool:
    """Whether `make_product` made it."""
    return isinstance(module, FP8Product | HighProduct)


def _dtype_of_output(layer: Any, x: torch.Tensor) -> torch.dtype:
    """The dtype in which torch computes: autocast's, or the promoted dtype of input and weight."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(x.dtype, layer.weight.dtype)
