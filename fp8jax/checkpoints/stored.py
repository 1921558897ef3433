"""The tensors of a Hugging Face folder, each with its scales, checked against its `config.json`."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fp8jax.checkpoints.folder import Entry
from fp8jax.checkpoints.names import Place
from fp8jax.checkpoints.serving import (
    CODES,
    INPUT,
    OF_TENSOR,
    PACKED,
    QUANTIZATION,
    SCALE,
    SCALE_INV,
    dequantized,
)
from fp8jax.formats import E4M3, E8M0

_TORCHAO, _OF_TORCHAO = "._weight_qdata", "._weight_scale"  # the parts of its Float8Tensor
_CODES = (CODES, PACKED, _TORCHAO)
# Ends of the names of scales beside a weight. Those of inputs are not read: training computes its own.
_SCALES = (SCALE_INV, SCALE, OF_TENSOR, _OF_TORCHAO)
_OF_INPUTS = (INPUT, ".input_scale", ".input_global_scale")


class Stored(NamedTuple):
    """A tensor of a folder: its values, or its codes and scales."""

    name: str
    codes: Entry
    scales: dict[str, Entry]
    block: tuple[int, int]  # rows and columns with one scale; 0 for a whole side

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        shape = self.codes.shape
        return (*shape[:-1], 2 * shape[-1]) if OF_TENSOR in self.scales else shape

    def grid(self) -> np.ndarray:
        """The scales as a matrix, float32; NVFP4's times the scale of the tensor."""
        array = _scale_of(self.scales).array()
        array = array.view(E8M0.dtype) if array.dtype == np.uint8 else array
        with np.errstate(all="ignore"):
            grid = array.astype(np.float32).reshape(array.shape if array.ndim == 2 else (-1, 1))
            if OF_TENSOR in self.scales:
                grid = grid * (1 / self.scales[OF_TENSOR].array().astype(np.float32).reshape(()))
            is_finite = np.isfinite(grid * np.float32(E4M3.max))
        if not (is_finite & (grid >= 0)).all():
            raise ValueError(
                f"`folder`: expected finite, positive scales for {self.name}, and finite values; got others."
            )
        return grid

    def value(self, place: Place) -> Any:
        """The values in Flax's order; codes are transposed before they are dequantized, as fewer bytes."""
        if not self.scales:
            array = self.codes.array()
            return place.arrange(self._narrowed(array) if array.dtype == np.float64 else array)
        if OF_TENSOR in self.scales:  # two codes a byte stay side by side
            return place.arrange(np.asarray(dequantized(self.codes.array(), self.grid(), self.block)))
        arrange = place._replace(shape=None).arrange
        block = tuple(self.block[axis] for axis in place.axes or (0, 1))
        values = dequantized(arrange(self.codes.array()), arrange(self.grid()), block)
        return values if place.shape is None else values.reshape(place.shape)

    def _narrowed(self, array: np.ndarray) -> np.ndarray:
        """float64 as float32."""
        with np.errstate(over="ignore"):
            narrowed = array.astype(np.float32)
        if np.any(np.isinf(narrowed) & np.isfinite(array)):
            raise overflow(self.name, np.dtype(np.float32))
        return narrowed


def overflow(name: str, dtype: np.dtype) -> ValueError:
    """The error for a tensor with a number that is an infinity in `dtype`."""
    return ValueError(
        f"`folder`: expected numbers up to {float(jnp.finfo(dtype).max):g}, {dtype}'s largest, in {name}; "
        "got a larger one. Give its parameter in `like` the dtype float32, or mend the folder."
    )


def _scale_of(scales: Mapping[str, Entry]) -> Entry:
    return next(scales[end] for end in (SCALE_INV, SCALE, _OF_TORCHAO) if end in scales)


def scale_blocks(config: Mapping[str, Any]) -> list[tuple[int, int]] | None:
    """The blocks, (out, in), that scales of the folder may have; 0 for a whole side, None without scales."""
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    try:
        if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3":
            rows, columns = map(_side, quantization.get("weight_block_size") or (0, 0))
            return [(rows, columns)]
        if method == "compressed-tensors" and quantization.get("transform_config"):
            method = "compressed-tensors with a transform_config"
        elif method == "compressed-tensors" and not quantization["config_groups"]:
            method = "compressed-tensors without config_groups"
        elif method == "compressed-tensors":
            return [_block(group["weights"]) for group in quantization["config_groups"].values()]
        if method == "torchao":
            kind = quantization["quant_type"]["default"]["_type"]
            if kind.startswith("Float8"):
                return [(0, 0), (1, 0)]
            method = f"torchao {kind}"
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        method = f"a {method} config of another form"
    raise ValueError(
        "`folder`: expected `quant_method` fp8 (e4m3), compressed-tensors (float) or torchao (Float8) in "
        f"config.json; got {str(method)[:100]!r}. Dequantize the model by the library that wrote it."
    )


def _side(number: Any) -> int:
    """A side of a block as config.json has it; raises ValueError if it is none."""
    if type(number) is not int or not 0 <= number < 2**31:
        raise ValueError(number)
    return number


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    if weights["type"] != "float":
        raise ValueError(weights["type"])
    if weights["strategy"] == "block":
        rows, columns = map(_side, weights["block_structure"])
        return rows, columns
    if weights["strategy"] in ("group", "tensor_group"):
        return 1, _side(weights["group_size"])
    return {"tensor": (0, 0), "channel": (1, 0)}[weights["strategy"]]


def tensors(entries: Mapping[str, Entry], blocks: list[tuple[int, int]] | None) -> Iterator[Stored]:
    """The tensors with their scales, checked."""
    entries = {f".{name}": entry for name, entry in entries.items()}  # `weight` alone has an end, too
    bases = {name.removesuffix(end) for end in _CODES for name in entries if name.endswith(end)}
    for name, entry in entries.items():
        ends = [end for end in (*_SCALES, *_OF_INPUTS) if name.endswith(end)]
        if ends and name.removesuffix(ends[0]) in bases:
            continue
        base = next((name.removesuffix(end) for end in _CODES if name.endswith(end)), None)
        scales = {end: entries[f"{base}{end}"] for end in _SCALES if f"{base}{end}" in entries}
        whole = name if base is None else f"{base}{CODES}"
        tensor = Stored(whole[1:], entry, scales, (0, 0))
        yield tensor._replace(block=_block_in(tensor, blocks))


def _block_in(tensor: Stored, blocks: list[tuple[int, int]] | None) -> tuple[int, int]:
    """The block of one scale; raises ValueError if scales are missing, or have a shape of no block."""
    dtype, scales, shape = tensor.codes.dtype, tensor.scales, tensor.shape
    is_low = dtype in (E4M3.dtype, np.uint8)
    if not scales and not is_low:
        return 0, 0
    is_packed = dtype == np.uint8
    of_tensor = [math.prod(scales[OF_TENSOR].shape)] if OF_TENSOR in scales else []
    is_whole = len(scales) == 1 + is_packed and of_tensor == [1] * is_packed
    if blocks is None or not is_low or not is_whole or len(shape) != 2:
        raise ValueError(
            "`folder`: expected plain numbers, or codes of a matrix with scales and a `quantization_config`, "
            f"for {tensor.name}; got {dtype}{list(tensor.codes.shape)}, {', '.join(scales) or 'no scale'}. "
            "Copy the folder again, with its config.json; `X.weight` has one of `X.weight_scale_inv` and "
            "`X.weight_scale`."
        )
    got = _scale_of(scales).shape
    legal = {
        block: tuple(-(-d // n) if n else 1 for d, n in zip(shape, block, strict=True)) for block in blocks
    }
    for block, grid in legal.items():
        if grid == (got if len(got) == 2 else (math.prod(got), 1)):
            return block
    raise ValueError(
        f"`folder`: expected scales of shape {' or '.join(str(list(grid)) for grid in legal.values())} for "
        f"{tensor.name}, shape {list(shape)}, as config.json says; got {list(got)}. Copy config.json again."
    )
