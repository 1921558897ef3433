"""A transformed model in the names and formats of serving engines.

report = save("served", model, variables, tokens, mapping=LLAMA, format="fp8", config=config)
arrays = jax.jit(lambda v: weights(model, v, tokens, mapping=LLAMA, format="fp8"))(variables)
"""

import json
import math
import numbers
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fp8jax.adapters.adapter import adapter_of
from fp8jax.checkpoints.folder import CONFIG, Writer
from fp8jax.checkpoints.maps import by_name
from fp8jax.checkpoints.names import NameMap, Place
from fp8jax.checkpoints.serving import (
    CODES,
    INPUT,
    QUANTIZATION,
    PlainFormat,
    ServingFormat,
    encode,
    format_of,
)
from fp8jax.checkpoints.tree import Key, Tree, named
from fp8jax.formats import E4M3
from fp8jax.quantization import BlockMethod, ScaledArray, is_scaled, value
from fp8jax.rewrite import Kernel
from fp8jax.scaling import LHS, RHS, of_recipe
from fp8jax.variables import PARAMS, SCALING, STATISTICS, has_params


class ExportRow(NamedTuple):
    """A kernel or a table that was written."""

    name: str  # the layer's in the folder
    is_quantized: bool
    is_unchanged: Any = True  # whether the model multiplies with the same numbers
    sqnr: Any = None  # dB, of a kernel that was quantized for the format


class ExportReport(NamedTuple):
    """The kernels that `save` wrote; `str` gives a table."""

    format: str
    rows: tuple[ExportRow, ...]

    def __str__(self) -> str:
        def answer(row: ExportRow) -> str:
            if not row.is_quantized:
                return "high precision"
            if row.is_unchanged:
                return "unchanged"
            return "quantized, exact" if row.sqnr == math.inf else f"quantized, SQNR {row.sqnr:.1f} dB"

        width = max((len(row.name) for row in self.rows), default=0)
        return "\n".join([self.format, *(f"{row.name:<{width}}  {answer(row)}" for row in self.rows)])


class ExportSource(NamedTuple):
    """A model to be written."""

    variables: Any
    frozen: Any  # the variables with kernels in their GEMMs' format
    kernels: Mapping[tuple[str, ...], Kernel]  # by path, also those that are not quantized


class Tensor(NamedTuple):
    """A torch tensor: an array, with the end "", or codes and scales, by the ends of their names."""

    name: str
    parts: dict[str, Array]
    row: ExportRow | None

    def arrays(self) -> dict[str, Array]:
        """The arrays by name; `weight` alone is a name, too."""
        base = f".{self.name}" if "" in self.parts else f".{self.name}".removesuffix(CODES)
        return {f"{base}{end}"[1:]: array for end, array in self.parts.items()}


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


def with_kernels(variables: Any, kernels: Mapping[tuple[Any, ...], Kernel]) -> ExportSource:
    """Variables with these kernels, to be written; raises ValueError for statistics of a BatchNorm."""
    if jax.tree.leaves(variables.get(STATISTICS)):
        raise ValueError(
            "`model`: expected one whose parameters are all that it has learned; got batch_stats, which no "
            "mapping leads to a folder."
        )
    tree, frozen = named(variables), {}
    by_path = {tuple(map(str, path)): kernel for path, kernel in kernels.items()}
    for path, kernel in by_path.items():
        if not kernel.recipe.is_quantized:
            continue
        state = {key[-1]: x for key, x in tree.leaves.items() if key[:-1] == (SCALING, *path)}
        try:
            frozen[PARAMS, *path] = kernel.for_inference(tree.leaves[PARAMS, *path], state)
        except KeyError as missing:
            raise ValueError(
                f"`variables`: expected the scaling state of {'/'.join(path)!r} in the collection "
                f"{SCALING!r}; got none with {missing}. Give all of the variables, not 'params' alone."
            ) from None
    return ExportSource(variables, tree.rebuilt(frozen), by_path)


def tensors_of(
    source: ExportSource, mapping: NameMap, format: PlainFormat | ServingFormat
) -> Iterator[Tensor]:
    """The tensors of a model in a format, one at a time."""
    has_quantized = any(kernel.recipe.is_quantized for kernel in source.kernels.values())
    if isinstance(format, ServingFormat) and not has_quantized:
        raise ValueError(
            "`format`: expected bf16 or fp32 for a model without kernels in FP8 or FP4; got one with scales."
        )
    tree, frozen = named(source.variables), named(source.frozen)
    for key in [key for key in tree.leaves if key[0] == PARAMS]:
        path, stored = key[1:], tree.leaves[key]
        planned, codes = source.kernels.get(path), frozen.leaves[key]
        kernel = planned if planned is not None and planned.recipe.is_quantized else None
        states = _states(tree, path) if format.is_static else []
        for index, name in mapping.names_of(path, stored.shape).items():
            place = mapping.place(name)
            assert place is not None
            part = _part(stored, index)
            shape, layer = place.torch_shape(part.shape), name.removesuffix(CODES)
            if planned is not None:
                _check_kernel(planned, place, name, shape)
            if kernel is None or isinstance(format, PlainFormat):
                array, row = place.restore(format.unquantized(part), shape), None
                is_matrix = len(shape) == 2 and f".{name}".endswith(CODES) and path[-1] != "embedding"
                if kernel is not None or is_matrix:
                    row = ExportRow(layer, False, True, _inf_if_finite(array))
                yield Tensor(name, {"": array}, row)
                continue
            format.check(name, shape, has_axes=place.axes is not None)
            x = place.restore(value(part).astype(jnp.float32), shape)
            q, method, has_scale = _part(codes, index), None, True
            if is_scaled(q) and q.data.dtype == E4M3.dtype:
                q = ScaledArray(place.restore(q.data, shape), q.scale.astype(jnp.float32))
                history = tree.leaves.get((SCALING, *path, "amax_history"))
                is_cast = not (is_scaled(stored) and stored.data.dtype == E4M3.dtype)
                if is_cast and history is not None and kernel.recipe.first_scale != "tensor":
                    has_scale = jnp.any(_of_layer(history, index, 2)[RHS] > 0)
            else:
                q = None
                method = _method_of(kernel, part.size, shape)
            parts, is_unchanged, sqnr = encode(x, q, method, format, has_scale)
            if format.is_static:
                first = kernel.first_state(path).get("scale")
                parts[INPUT] = _input_scale(name, states, index, first)
            yield Tensor(name, parts, ExportRow(layer, True, is_unchanged, sqnr))


def _check_kernel(kernel: Kernel, place: Place, name: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError if a kernel, `shape` in torch, is no layer, or no matrix, of the model."""
    if place.layer and not kernel.is_stacked_in_front:
        raise ValueError(
            f"`model`: expected scans along axis 0 of {'/'.join(place.path)}; got one along axis "
            f"{kernel.axes[0]}. Scan along axis 0, and move that axis of the arrays to the front."
        )
    gemm = kernel.matrix if place.shape is not None and len(shape) == 2 else ()
    if len(gemm) == 2 and math.prod(gemm) == math.prod(shape) and sorted(gemm) != sorted(shape):
        raise ValueError(
            f"`mapping`: expected {gemm[0]} inputs and {gemm[1]} outputs for {name}; got {list(shape)}. Its "
            "`Rename` wants a `shape` with -1 for the dimension that torch has, too."
        )


def _inf_if_finite(x: Array) -> Array:
    """The SQNR of an array that is not quantized: NaN if it has an infinity or NaN."""
    return jnp.where(jnp.isfinite(x).all(), jnp.inf, jnp.nan)


def _part(leaf: Any, index: tuple[int, ...]) -> Any:
    """One of the stacked layers of a leaf; the scale of one layer has no axes."""
    if not is_scaled(leaf):
        return leaf[index]
    own = tuple(i if n > 1 else 0 for i, n in zip(index, leaf.scale.shape, strict=False))
    return ScaledArray(leaf.data[index], leaf.scale[own].reshape(()))


def _method_of(kernel: Kernel, size: int, shape: tuple[int, ...]) -> BlockMethod | None:
    """How the model quantizes a matrix, shape=(out, in), in blocks; None if it shares blocks, or NVFP4's
    scale of the tensor, with other matrices of its GEMM."""
    method = of_recipe(kernel.recipe).kernel_method
    if method is None or not kernel.matrix or math.prod(kernel.matrix) == size:
        return method
    is_whole = all(dim % block == 0 for dim, block in zip(shape, method.block, strict=True))
    return method if is_whole and method.scale != "E4M3" else None


def _of_layer(entry: Any, index: tuple[int, ...], rank: int) -> Any:
    """One layer's entry of a scaling state; the entry of one layer has `rank` axes."""
    return entry[index[: entry.ndim - rank]]


def _states(tree: Tree, path: Key) -> list[dict[str, Any]]:
    """The scaling states of a kernel's calls, which are at `kernel`, `kernel#1` and so on."""
    states: dict[Key, dict[str, Any]] = {}
    pattern = re.compile(rf"{re.escape('/'.join(path))}(#\d+)?")
    for key, leaf in tree.leaves.items():
        if key[0] == SCALING and pattern.fullmatch("/".join(key[1:-1])):
            states.setdefault(key[:-1], {})[key[-1]] = leaf
    return list(states.values())


def _input_scale(name: str, states: list[dict[str, Any]], index: tuple[int, ...], first: Any) -> Array:
    """The largest scale of the inputs of a kernel's calls, those aside that had only zeros or no input.

    NaN if it is the `first` one, and no call has an amax.
    """
    if not all("amax_history" in state for state in states) or not states:
        raise ValueError(
            f"`format`: expected delayed scaling for fp8:static, whose scales of inputs it takes; {name} has "
            "another scaling. Choose fp8:tensor."
        )
    scales = jnp.stack([_of_layer(state["scale"], index, 1)[LHS] for state in states])
    history = jnp.stack([_of_layer(state["amax_history"], index, 2)[LHS] for state in states])
    has_amax = jnp.any(history > 0, axis=1)
    largest = jnp.max(jnp.where(has_amax | ~has_amax.any(), scales, 0))
    is_first = ~has_amax.any() & (largest == _of_layer(first, index, 1)[LHS])
    return jnp.where(is_first, jnp.nan, largest)
