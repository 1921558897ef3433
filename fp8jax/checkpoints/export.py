"""A transformed model in the names and formats of serving engines.

report = save("served", model, variables, tokens, mapping=LLAMA, format="fp8", config=config)
arrays = jax.jit(lambda v: weights(model, v, tokens, mapping=LLAMA, format="fp8"))(variables)
"""

import json
import math
import numbers
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Shaped

from fp8jax.adapters.adapter import adapter_of
from fp8jax.checkpoints.folder import CONFIG, Writer
from fp8jax.checkpoints.maps import by_name
from fp8jax.checkpoints.names import NameMap
from fp8jax.checkpoints.serving import INPUT, QUANTIZATION, format_of
from fp8jax.checkpoints.tensors import ExportRow, ExportSource, tensors_of, with_kernels
from fp8jax.rewrite import Kernel
from fp8jax.variables import PARAMS, has_params


class ExportReport(NamedTuple):
    """The kernels that `save` wrote; `str` gives a table."""

    format: str
    rows: tuple[ExportRow, ...]
    step: int | None = None  # of the checkpoint of a run, from `train.export`

    def __str__(self) -> str:
        def answer(row: ExportRow) -> str:
            if not row.is_quantized:
                return "high precision"
            if row.is_unchanged:
                return "unchanged"
            return "quantized, exact" if row.sqnr == math.inf else f"quantized, SQNR {row.sqnr:.1f} dB"

        width = max((len(row.name) for row in self.rows), default=0)
        first = self.format if self.step is None else f"{self.format}, of step {self.step}"
        return "\n".join([first, *(f"{row.name:<{width}}  {answer(row)}" for row in self.rows)])


def save(
    folder: str | os.PathLike[str],
    model: Any,
    *args: Any,
    mapping: NameMap | str,
    config: Mapping[str, Any],
    format: str = "fp8",
    max_shard_bytes: int = 5 * 10**9,
    **kwargs: Any,
) -> ExportReport:
    """Writes a transformed model as a Hugging Face folder for Transformers, vLLM or SGLang.

    The codes and scales that the model multiplies with are written bit for bit if the format can hold them.
    Other kernels are quantized once, from their stored values, as are those whose delayed scale has seen no
    amax. Layers in high precision keep their dtype, and are in the config's list of such layers. The formats
    `bf16` and `fp32` have plain weights: all stored values, rounded to nearest to this dtype, and a config
    without `quantization_config`.

    Args:
        folder: a new or empty folder.
        model: a model from `fp8jax.transform`, without adapters.
        args, kwargs: the model's variables and example inputs, arrays or `jax.ShapeDtypeStruct`s, as for
            `freeze`; for an NNX module nothing.
        mapping: from torch's names; or a name: gpt2, llama, mixtral, qwen3, or package.module:name of a map.
        config: the model's `config.json`, such as `transformers.LlamaConfig(...).to_dict()`.
        format: a name of `FORMATS`.
        max_shard_bytes: a larger model has several files.

    Returns:
        An `ExportReport`, which says for each kernel whether it is unchanged, or its SQNR in dB. Of arrays
        that several processes have, the first process writes the folder; the report of the others is empty.

    Raises:
        ValueError: an argument is of another kind; the folder is not empty; no rename leads to a parameter;
            the format cannot hold a kernel, or has scales for a model without quantized kernels; a kernel
            has an infinity or NaN; a scan is along another axis than the first; the model has adapters, or
            statistics of a BatchNorm; an array is sharded over processes.
        TypeError: `model` is not from `fp8jax.transform`, or `folder` is no path.
        ImportError: safetensors is not installed.
    """
    variables, kernels = _split(model, args, kwargs)
    local = _local(variables)
    if local is None:
        return ExportReport(format, ())
    return write(folder, with_kernels(local, kernels), mapping, config, format, max_shard_bytes)


def write(
    folder: str | os.PathLike[str],
    source: ExportSource,
    mapping: NameMap | str,
    config: Mapping[str, Any],
    format: str,
    max_shard_bytes: int,
) -> ExportReport:
    """Writes a model as a Hugging Face folder; see `save`."""
    given, chosen, mapping = folder, format_of(format), by_name(mapping)
    folder = pathlib.Path(folder).absolute()
    files = sorted(os.listdir(folder)) if folder.is_dir() else []
    hidden = f".{folder.name}."  # a temporary folder's name begins so
    if files or (os.path.lexists(folder) and not folder.is_dir()):
        wrong = f"has {files[0]}" if files else "is no folder"
        wrong += ", of a stopped export: delete it" if files and files[0].startswith(hidden) else ""
        raise ValueError(f"`folder`: expected a new or empty folder; got {given}, which {wrong}.")
    if not isinstance(max_shard_bytes, numbers.Real) or not max_shard_bytes > 0:
        raise ValueError(f"`max_shard_bytes`: expected a positive number; got {max_shard_bytes!r}.")
    if not isinstance(config, Mapping):
        raise ValueError(f"`config`: expected a dict that JSON can hold; got {config!r:.99}.")
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`config`: expected a dict that JSON can hold; got: {error}.") from None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`folder`: expected a path below a folder; got {given}: {error}.") from None
    rows: list[ExportRow] = []
    home = folder if folder.exists() else folder.parent
    with tempfile.TemporaryDirectory(dir=home, prefix=hidden) as temporary:
        new = pathlib.Path(temporary) / "new"
        new.mkdir()
        writer = Writer(new, max_shard_bytes)
        for tensor in tensors_of(source, mapping, chosen):
            for name, array in tensor.arrays().items():
                writer.add(name, np.asarray(array))
            if (row := tensor.row) is not None:
                same, sqnr = bool(row.is_unchanged), float(math.inf if row.sqnr is None else row.sqnr)
                if math.isnan(sqnr):
                    raise ValueError(
                        f"`variables`: expected finite numbers in {row.name}; got an infinity or NaN."
                    )
                if np.isnan(tensor.parts.get(INPUT, 0)):
                    raise ValueError(
                        f"`variables`: expected an amax of the inputs of {row.name} for {format}; got a "
                        "scaling state that has seen none. Run a training step, or choose fp8:tensor."
                    )
                rows.append(row._replace(is_unchanged=same, sqnr=None if same else sqnr))
        writer.finish()
        ignored = [row.name for row in rows if not row.is_quantized]
        if "lm_head" not in [row.name for row in rows]:
            ignored.append("lm_head")  # tied to the embedding
        whole = {key: entry for key, entry in config.items() if key != QUANTIZATION}
        whole |= chosen.config_of(ignored, config)
        (new / CONFIG).write_text(json.dumps(whole, indent=2) + "\n")
        if home == folder:  # which may be a link, or the current folder
            for file in sorted(new.iterdir(), key=lambda file: file.name == CONFIG):
                file.rename(folder / file.name)
        else:
            try:
                new.rename(folder)
            except OSError as error:
                raise ValueError(
                    f"`folder`: expected that nothing else writes {given}; got {error.strerror}. If this is "
                    "one of many processes, save in one of them."
                ) from None
    return ExportReport(format, tuple(rows))


def weights(
    model: Any, *args: Any, mapping: NameMap | str, format: str = "fp8", **kwargs: Any
) -> dict[str, Shaped[Array, "..."]]:
    """The arrays that `save` writes, by name: codes, scales and tensors in high precision.

    It can be compiled. A reinforcement-learning loop gives the arrays to its sampler after each step. Scales
    of a kernel with an infinity or NaN are NaN, as is a static scale of inputs that no step has seen.

    Args:
        model, args, kwargs, mapping, format: see `save`.
    """
    found = tensors_of(source_of(model, args, kwargs), by_name(mapping), format_of(format))
    return {name: array for tensor in found for name, array in tensor.arrays().items()}


def source_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportSource:
    """A transformed model, to be written; raises ValueError if it has adapters."""
    return with_kernels(*_split(model, args, kwargs))


def _local(variables: Any) -> Any:
    """The variables as arrays of this process; None if another process writes them for all.

    Raises:
        ValueError: an array is sharded over processes.
    """
    writers = {jax.process_index()}

    def local(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if not x.is_fully_replicated:
            raise ValueError(
                "`variables`: expected arrays that each process has whole; got "
                f"{jax.tree_util.keystr(path, simple=True, separator='/')}, sharded over processes. In all "
                "processes say `jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))` first."
            )
        writers.add(min(device.process_index for device in x.sharding.device_set))
        return x.addressable_data(0)

    found = jax.tree_util.tree_map_with_path(local, variables)
    return found if min(writers) == jax.process_index() else None


def _split(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[tuple[str, ...], Kernel]]:
    """The variables and kernels of a model without adapters."""
    adapter = adapter_of(model)
    if adapter.settings.lora is not None:
        raise ValueError(
            "`model`: expected one without adapters; merge them, and transform the plain module."
        )
    variables, inputs = adapter.split(*args)
    if not has_params(variables):
        raise ValueError(
            f"`variables`: expected a tree with {PARAMS!r}, as `model.init` gives; got "
            f"{type(variables).__name__} without it. Give all variables."
        )
    return variables, adapter.kernels(variables, *inputs, **kwargs)
