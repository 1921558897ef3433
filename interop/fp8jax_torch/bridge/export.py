"""A torch model as a Hugging Face folder; see `fp8jax.checkpoints`."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from fp8jax.checkpoints import ExportReport
from fp8jax.checkpoints.export import write
from fp8jax.checkpoints.tensors import with_kernels
from fp8jax.rewrite import Kernel
from fp8jax_torch.bridge.maps import mapping_of
from fp8jax_torch.bridge.weights import to_flax
from fp8jax_torch.linear import FP8


def save(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    config: Mapping[str, Any],
    format: str = "fp8",
    max_shard_bytes: int = 5 * 10**9,
) -> ExportReport:
    """Writes a model from `fp8jax_torch.prepare` as a Hugging Face folder for Transformers, vLLM or SGLang.

    See `fp8jax.checkpoints.save`. The names are the model's own.

    Args:
        folder: a new or empty folder.
        model: of Hugging Face's names, with the native backend; also inside of `torch.compile` or
            DistributedDataParallel.
        config: the model's `config.json`, such as `model.config.to_dict()`.
        format: a name of `fp8jax.checkpoints.FORMATS`.
        max_shard_bytes: a larger model has several files.

    Raises:
        ValueError: as `fp8jax.checkpoints.save`; or no layer of the model is in FP8, or
            a layer is compiled by itself.
    """
    model = _inner(model)
    for name, _ in model.named_modules():
        if "_orig_mod" in name.split("."):
            raise ValueError(
                f"`model`: expected names without those of `torch.compile`; got {name}. Compile the whole "
                "model, or a layer in its place: `layer.compile()`."
            )
    mapping = mapping_of(model)
    variables = to_flax(model.state_dict(), mapping)
    kernels = {}
    layer: Any
    for name, layer in model.named_modules():
        place = mapping.place(f"{name}.weight".removeprefix(".")) if isinstance(layer, FP8) else None
        if place is not None:
            kernels[place.path] = Kernel(layer.fp8.recipe, (), 0)
    if not kernels:
        raise ValueError("`model`: expected layers in FP8, as `fp8jax_torch.prepare` makes them; got none.")
    return write(folder, with_kernels(variables, kernels), mapping, config, format, max_shard_bytes)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of `torch.compile` and data parallelism, which has the names that engines know."""
    if "_orig_mod" in model._modules:
        return _inner(model.get_submodule("_orig_mod"))
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return _inner(model.module)
    return model
