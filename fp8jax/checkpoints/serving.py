"""Formats of kernels that serving engines load.

    parts, is_unchanged, sqnr = encode(x, None, None, FORMATS["fp8"])    # {".weight": codes, ...}

| format | a scale for each | scales | config |
|---|---|---|---|
| `bf16`, `fp32` | no scales: plain weights | - | no entry |
| `fp8`, `fp8:ue8m0` | 128x128 block | float32, E8M0 | DeepSeek's, of Transformers, vLLM and SGLang |
| `fp8:tensor`, `fp8:static` | tensor | float32 | the same without blocks; "static" has input scales |
| `compressed-tensors:tensor` | tensor | float32 | compressed-tensors |
| `compressed-tensors:channel` | row | float32 | compressed-tensors |
| `compressed-tensors:block` | 128x128 block | float32 | compressed-tensors |
| `compressed-tensors:mxfp8` | 1x32 block | E8M0 as uint8 | compressed-tensors |
| `compressed-tensors:nvfp4` | 1x16 block | E4M3, times a scale of the tensor | compressed-tensors |

Scales are multiplied with codes, also those that Transformers calls `weight_scale_inv`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from fp8jax.formats import E2M1, E4M3, E8M0, Format
from fp8jax.quantization import BlockMethod, PackedE2M1, ScaledArray, own_value, quantize_blocks, value

WHOLE = 0  # a side of a block that is the whole side of the matrix

CODES, PACKED = ".weight", ".weight_packed"
SCALE, OF_TENSOR = ".weight_scale", ".weight_global_scale"
SCALE_INV, INPUT = ".weight_scale_inv", ".activation_scale"
QUANTIZATION = "quantization_config"  # the entry of `config.json`


@dataclasses.dataclass(frozen=True)
class PlainFormat:
    """Plain weights in a Hugging Face folder, all in one dtype."""

    dtype: Any
    is_static = False

    def config_of(self, ignored: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of `config.json` to set: the dtype, in which Transformers loads the weights."""
        del ignored
        return {name: jnp.dtype(self.dtype).name for name in ("dtype", *{"torch_dtype"} & {*config})}

    def unquantized(self, x: Any) -> Any:
        """A weight as it is written: rounded to nearest to `dtype`, if it is of floats."""
        x = value(x)
        return x.astype(self.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


@dataclasses.dataclass(frozen=True, eq=False)
class ServingFormat:
    """A format of kernels, shape=(out, in), in a Hugging Face folder.

    Attributes:
        method: how a kernel is quantized that is not in the format yet; its block may have a side `WHOLE`.
        stored: dtype of scales in files: float32, E8M0, or uint8 for exponents of E8M0.
        scale: end of the name of a scale.
        scale_rank: number of dims of a scale, 0, 1 or 2.
        config: the entry `quantization_config`, without layers that stay in high precision.
        ignored: the key of these layers in `config`.
    """

    method: BlockMethod
    stored: Any
    scale: str
    scale_rank: int
    config: dict[str, Any]
    ignored: str

    @property
    def is_static(self) -> bool:
        """Whether files have scales of inputs."""
        return self.config.get("activation_scheme") == "static"

    def config_of(self, ignored: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
        """The entry of `config.json` to set; `ignored` are the layers in high precision."""
        del config
        return {QUANTIZATION: {**self.config, self.ignored: list(ignored)}}

    def unquantized(self, x: Any) -> Any:
        """A weight in high precision as it is written: in its dtype in the model."""
        return own_value(x)

    def holds(self, format: Format, block: tuple[int, ...]) -> bool:
        """Whether the files can have codes in `format` with a scale for each `block`."""
        pairs = zip(block, self.method.block, strict=True)
        fits = all(size == WHOLE or (own != WHOLE and size % own == 0) for size, own in pairs)
        return fits and format == self.method.format

    def check(self, name: str, shape: tuple[int, ...], *, has_axes: bool) -> None:
        """Raises ValueError if engines could not load a kernel, shape=(out, in).

        Without `axes` in its `Rename` it may be Conv1D's, (in, out).
        """
        rows, columns = self.method.block
        if len(shape) != 2:
            raise ValueError(
                f"`mapping`: expected a matrix for {name}; got shape {list(shape)}. Layers under a scan want "
                "`mapping.stacked(name of their container)`."
            )
        if not f".{name}".endswith(CODES):
            raise ValueError(
                f"`mapping`: expected a kernel with a name that ends in {CODES}, from which engines make the "
                f"names of its scales; got {name}. Exclude the layer by a rule, or take the format bf16."
            )
        if not has_axes and self.config["quant_method"] != "fp8":
            raise ValueError(
                f"`format`: expected an fp8 one for {name}, whose `Rename` has no `axes`, as of Conv1D's "
                "weights, (in, out); got compressed-tensors, which has Linear layers only. Give the `Rename` "
                "`axes=(0, 1)` if the weight is (out, in)."
            )
        if rows != columns and columns and shape[1] % columns:
            raise ValueError(
                f"`format`: expected a multiple of {columns} inputs for {name}; got {shape[1]}. Exclude the "
                "layer by a rule, or choose another format."
            )


def _fp8(block: tuple[int, int], stored: Any = jnp.float32, activations: str = "dynamic") -> ServingFormat:
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": activations}
    config["weight_block_size"] = None if WHOLE in block else list(block)
    if stored == E8M0.dtype:
        config["scale_fmt"] = "ue8m0"
    kind = "float32" if stored == jnp.float32 else "power_of_two"
    method = BlockMethod(E4M3, block, kind)
    return ServingFormat(
        method, stored, SCALE_INV, 0 if WHOLE in block else 2, config, "modules_to_not_convert"
    )


def _compressed(
    method: BlockMethod,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    stored: Any = jnp.float32,
    format: str = "float-quantized",
) -> ServingFormat:
    common = {"num_bits": method.format.bits, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**common, "dynamic": True, **inputs},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    rank = 1 if method.block == (WHOLE, WHOLE) else 2
    return ServingFormat(method, stored, SCALE, rank, config, "ignore")


_SQUARE, _TENSOR, _ROW = (128, 128), (WHOLE, WHOLE), (1, WHOLE)
_TOKEN = {"strategy": "token"}
_GROUP_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_GROUP_16 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}

FORMATS: dict[str, PlainFormat | ServingFormat] = {
    "bf16": PlainFormat(jnp.bfloat16),
    "fp32": PlainFormat(jnp.float32),
    "fp8": _fp8(_SQUARE),
    "fp8:ue8m0": _fp8(_SQUARE, E8M0.dtype),
    "fp8:tensor": _fp8(_TENSOR),
    "fp8:static": _fp8(_TENSOR, activations="static"),
    "compressed-tensors:tensor": _compressed(
        BlockMethod(E4M3, _TENSOR, "float32"), {"strategy": "tensor"}, _TOKEN
    ),
    "compressed-tensors:channel": _compressed(
        BlockMethod(E4M3, _ROW, "float32"), {"strategy": "channel"}, _TOKEN
    ),
    "compressed-tensors:block": _compressed(
        BlockMethod(E4M3, _SQUARE, "float32"),
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ),
    "compressed-tensors:mxfp8": _compressed(
        BlockMethod(E4M3, (1, 32), "E8M0"), _GROUP_32, _GROUP_32, jnp.uint8, "mxfp8-quantized"
    ),
    "compressed-tensors:nvfp4": _compressed(
        BlockMethod(E2M1, (1, 16), "E4M3"), _GROUP_16, None, E4M3.dtype, "nvfp4-pack-quantized"
    ),
}


def format_of(name: str) -> PlainFormat | ServingFormat:
    """The format with this name; raises ValueError if there is none."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"`format`: expected one of {', '.join(FORMATS)}; got {name!r}.")
    return FORMATS[name]


@functools.partial(jax.jit, static_argnames=("method", "format"))
def encode(
    x: Float[Array, "rows columns"],
    codes: ScaledArray | None,
    method: BlockMethod | None,
    format: ServingFormat,
    has_scale: Bool[Array, ""] | bool = True,
) -> tuple[dict[str, Array], Bool[Array, ""], Float32[Array, ""]]:
    """A kernel in a format.

    Args:
        x: the kernel's value, in torch's order.
        codes: the E4M3 codes with one scale that the model multiplies with, if it does.
        method: how the model quantizes `x` in blocks, if it does.
        format: of the files.
        has_scale: whether the scale of `codes` is of this kernel; a delayed one is not before an amax.

    Returns:
        The arrays by the ends of their names; whether the model multiplies with the same codes and scales;
        and the SQNR in dB, of codes that are quantized for the format. If `x` has an infinity or NaN, the
        scales and the SQNR are NaN.
    """
    unchanged, is_unchanged = None, jnp.bool_(has_scale)
    if codes is not None and format.holds(E4M3, _TENSOR):
        unchanged = _parts(codes, x.shape, _TENSOR, format)
        if format.stored != jnp.float32:
            is_unchanged &= lax.bitcast_convert_type(codes.scale, jnp.uint32) % np.uint32(2**23) == 0
    elif codes is None and method is not None and format.holds(method.format, method.block):
        if format.stored == jnp.float32 or method.scale in ("power_of_two", "E8M0", format.method.scale):
            unchanged = _parts(_quantized(x, method), x.shape, method.block, format)
    q = _quantized(x, format.method)
    new = _parts(q, x.shape, format.method.block, format)
    error = q.dequantize()[: x.shape[0], : x.shape[1]] - x
    largest, is_finite = jnp.max(jnp.abs(x)), jnp.isfinite(x).all()
    ratio = jnp.sum(jnp.square(x / largest)) / jnp.sum(jnp.square(error / largest))
    sqnr = jnp.where(is_finite, jnp.where(largest == 0, jnp.inf, 10 * jnp.log10(ratio)), jnp.nan)
    if unchanged is None:
        parts, is_unchanged = new, jnp.bool_(False)
    else:
        parts = jax.tree.map(lambda a, b: jnp.where(is_unchanged, a, b), unchanged, new)
    scale = parts[format.scale]
    broken = 255 if scale.dtype == jnp.uint8 else jnp.asarray(jnp.nan, scale.dtype)
    return {**parts, format.scale: jnp.where(is_finite, scale, broken)}, is_unchanged, sqnr


def _quantized(x: Float[Array, "rows columns"], method: BlockMethod) -> ScaledArray:
    """`quantize_blocks` with sides `WHOLE`."""
    sizes = tuple(size or dim for size, dim in zip(method.block, x.shape, strict=True))
    return quantize_blocks(x, dataclasses.replace(method, block=sizes))


def _parts(
    q: ScaledArray, shape: tuple[int, ...], block: tuple[int, ...], format: ServingFormat
) -> dict[str, Array]:
    """The arrays of a kernel whose codes, maybe padded, are in the format."""
    rows, columns = shape
    scale = q.scale.data if isinstance(q.scale, ScaledArray) else q.scale
    scale = scale.reshape(scale.shape or (1, 1))
    for axis, (dim, own, source) in enumerate(zip(shape, format.method.block, block, strict=True)):
        starts = np.arange(0, dim, own or dim)
        scale = jnp.take(scale, starts // (source or dim), axis=axis)
    if isinstance(q.data, PackedE2M1):
        of_tensor = 1 / q.scale.scale.reshape(1)
        return {PACKED: q.data.bytes[:rows, : columns // 2], format.scale: scale, OF_TENSOR: of_tensor}
    if format.stored != jnp.float32:
        exponents = lax.bitcast_convert_type(value(scale).astype(jnp.float32), jnp.uint32) >> np.uint32(23)
        scale = exponents.astype(jnp.uint8)
        scale = scale if format.stored == jnp.uint8 else lax.bitcast_convert_type(scale, format.stored)
    scale = scale.reshape(scale.shape if format.scale_rank == 2 else (1,) * format.scale_rank)
    return {CODES: q.data[:rows, :columns], format.scale: scale}


@functools.partial(jax.jit, static_argnames="block")
def dequantized(
    codes: Any, grid: Float[Array, "rows columns"], block: tuple[int, ...]
) -> Float32[Array, "rows columns"]:
    """The value of a kernel: E4M3 codes or bytes of packed E2M1, times scales of blocks (with a side 0 for a
    whole side)."""
    data = PackedE2M1(codes) if codes.dtype == jnp.uint8 else codes
    for axis, (dim, size) in enumerate(zip(data.shape, block, strict=True)):
        grid = jnp.take(grid, np.arange(dim) // (size or dim), axis=axis)
    return data.astype(jnp.float32) * grid
