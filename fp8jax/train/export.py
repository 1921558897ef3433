"""A run as a Hugging Face folder, without its model.

    report = export("runs/gpt-1", "served", mapping=GPT2, config=config, format="fp8")

A checkpoint has the names, the weights and the scaling state of its run, and in its metadata the kernels with
their recipes.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from fp8jax.adapters.nnx.variables import collections_of
from fp8jax.checkpoints import ExportReport, NameMap
from fp8jax.checkpoints.export import write
from fp8jax.checkpoints.tensors import with_kernels
from fp8jax.checkpoints.tree import named
from fp8jax.rewrite import Kernel, lora
from fp8jax.train import checkpoint
from fp8jax.variables import PARAMS, SCALING


def export(
    run: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    mapping: NameMap | str,
    config: Mapping[str, Any],
    format: str = "fp8",
    max_shard_bytes: int = 5 * 10**9,
) -> ExportReport:
    """Writes the newest undamaged checkpoint of a run as a Hugging Face folder; see `checkpoints.save`.

    Each damaged newer checkpoint gets a warning, and the report says the step.

    Args:
        run: the folder of a run of `fit`, or of its checkpoints. Of a run with a twin the model is the
            recipe's.
        folder, mapping, config, format, max_shard_bytes: see `checkpoints.save`.

    Raises:
        ValueError: there is no such checkpoint; it does not say which kernels are quantized, as those of
            fp8jax 0.1.0; the model has adapters; and see `checkpoints.save`.
    """
    run = pathlib.Path(run)
    found = checkpoint.read_variables(run / "checkpoints" if (run / "checkpoints").is_dir() else run)
    variables, kernels = found.state, found.metadata.get("kernels")
    variables = variables if PARAMS in variables else collections_of(variables)
    has_adapters = any(path[-1] == lora.A for path in named(variables).leaves)
    if kernels is None or has_adapters or (variables.get(SCALING) and not kernels):
        raise ValueError(
            f"`run`: expected one of a model without adapters, by this version of fp8jax; got {run}, "
            "which is another one. Restore it into its model, and call `fp8jax.checkpoints.save`."
        )
    planned = {tuple(path.split("/")): Kernel.from_json(values) for path, values in kernels.items()}
    report = write(folder, with_kernels(variables, planned), mapping, config, format, max_shard_bytes)
    return report._replace(step=found.step)
