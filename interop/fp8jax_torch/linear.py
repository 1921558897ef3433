"""Linear layers under a recipe: the user's modules with another `forward`.

A layer keeps its name, its parameters' names and its class as a base class, so `isinstance(layer, nn.Linear)`
stays true.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import nn

from fp8jax import formats
from fp8jax.recipe import Recipe
from fp8jax_torch import casts
from fp8jax_torch.layers import is_conv1d
from fp8jax_torch.matmul import matmul, without_autocast
from fp8jax_torch.mixins import mixed, unmixed
from fp8jax_torch.safetensors_keys import join
from fp8jax_torch.scaled import is_scaled, value
from fp8jax_torch.scaling import ScalingState


class Converted:
    """Base of the mixins of an `nn.Linear` or a Conv1D."""

    in_out: bool  # whether the weight's shape is (in, out)

    def forward(self: Any, x: Float[torch.Tensor, "... k"]) -> Float[torch.Tensor, "... n"]:
        """`x @ weight + bias`, in the dtype of autocast, or the promoted dtype of input and weight."""
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = torch.promote_types(x.dtype, self.weight.dtype)
        out = self._matmul(x, dtype)
        return out if self.bias is None else out + self.bias.to(dtype)


class FP8(Converted):
    """Mixin that multiplies in FP8."""

    fp8: ScalingState

    def _load_from_state_dict(self: Any, state: Any, prefix: str, *args: Any) -> None:
        """As torch's; takes a weight in two entries, too, see `safetensors_keys`."""
        join(state, f"{prefix}weight", self.weight.dtype)
        super()._load_from_state_dict(state, prefix, *args)  # pyright: ignore[reportAttributeAccessIssue]
        if is_scaled(self.weight):
            self.weight.moved_by = None

    def _matmul(self: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        state, weight = self.fp8, self.weight
        if state.recipe.weight != "FP32" and isinstance(weight, nn.Parameter) and not is_scaled(weight):
            name = f"{state.path}.weight".replace("/", ".").lstrip(".")
            raise TypeError(
                f"`{name}`: expected a ScaledTensor, since weight={state.recipe.weight}; got a plain "
                "parameter, which the optimizer may not know. Write into the old one, by `load_state_dict` "
                "without `assign` or by `weight.data = x`. FSDP needs weight=FP32,weight_grad=FP32."
            )
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "`model`: expected one replica in a process; got one of nn.DataParallel's, which lose the "
                "scaling state. Take torch.nn.parallel.DistributedDataParallel, or one GPU."
            )
        _check_optimizer(state, weight)
        state.begin_forward()
        return matmul(x, weight, state, in_out=self.in_out, dtype=dtype)


def _check_optimizer(state: ScalingState, weight: Any) -> None:
    """Raises RuntimeError where an optimizer without the recipe's masters or rounding moved the weight."""
    moved_by, recipe = getattr(weight, "moved_by", None), state.recipe
    needed = recipe.master_weight, recipe.rounding[1]
    if moved_by not in (None, needed) and needed != ("-", "nearest"):
        raise RuntimeError(
            f"`model`: expected an optimizer with master_weight={needed[0]} and rounding={needed[1]} of "
            f"weights, which {recipe} needs; one with master_weight={moved_by[0]} and rounding={moved_by[1]} "
            f"has moved `{state.path or '(root)'}`. Load the weights from before, and use "
            f"fp8jax_torch.optim.AdamW(..., recipe={str(recipe)!r}), or give `prepare` the optimizer."
        )


class HighPrecision(Converted):
    """Mixin that multiplies in the high-precision format `gemm`."""

    gemm: str

    def _matmul(self: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        gemm = casts.dtype_of(formats.get(self.gemm))
        with without_autocast(x.device):
            weight = value(self.weight).to(gemm)
            return (x.to(gemm) @ (weight if self.in_out else weight.t())).to(dtype)


def convert(layer: Any, recipe: Recipe, path: str) -> None:
    """Changes the class of the plain layer at `path` to a class that follows the recipe."""
    layer.in_out = is_conv1d(layer)
    if recipe.is_quantized:
        layer.fp8 = ScalingState(recipe, layer.weight.device, path)
        layer.__class__ = mixed(FP8, type(layer))
    else:
        layer.gemm = recipe.gemm
        layer.__class__ = mixed(HighPrecision, type(layer))


def restore(layer: Any, plain: dict[int, nn.Parameter]) -> None:
    """Undoes `convert` and dequantizes the weight; `plain` collects plain weights by ids of scaled ones."""
    for name in ("in_out", "fp8", "gemm"):
        if hasattr(layer, name):
            delattr(layer, name)
    layer.__class__ = unmixed(type(layer))
    weight = layer.weight
    if is_scaled(weight):
        new = nn.Parameter(value(weight.detach()), weight.requires_grad)
        layer.weight = plain.setdefault(id(weight), new)
