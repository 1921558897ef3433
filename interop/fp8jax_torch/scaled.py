"""A tensor kept in few bits, as a `torch.Tensor`: codes and a scale, `value = codes * scale`.

    >>> import torch
    >>> from fp8jax import formats
    >>> from fp8jax_torch import quantize
    >>> weight = quantize(torch.tensor([0.1, -2.0, 300.0]), formats.E4M3)
    >>> weight.codes.dtype, weight.dtype
    (torch.float8_e4m3fn, torch.float32)
    >>> weight + 1  # arithmetic acts on the value and returns a plain tensor
    tensor([   1.1046,   -1.0089,  301.0000])

It stands wherever a tensor stands: as a parameter, as a gradient, in a `state_dict`. What torch writes in
place (an optimizer's step, `grad.add_`, `load_state_dict`) is rounded again on a fresh power-of-two
scale; what it multiplies in place (`clip_grad_norm_`) changes the scale alone.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.quantization import largest_scale
from fp8jax_torch import casts

_aten = torch.ops.aten


class ScaledTensor(torch.Tensor):
    """Codes and the scale that gives them their meaning: `value = codes * scale`.

    Attributes:
        codes: any shape, dtype that of an E4M3, E5M2, FP16 or BF16 code.
        scale: float32, shape ().

    To torch it has codes' shape and device, and the dtype that the value had when it was quantized.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: Any = torch.float32) -> "ScaledTensor":
        """See the class; `dtype` is the value's."""
        if scale.shape != () or scale.dtype != torch.float32:
            raise ValueError(
                "`scale`: expected float32 of shape (); got "
                f"{str(scale.dtype).removeprefix('torch.')}{list(scale.shape)}."
            )
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        self.codes, self.scale = codes, scale
        return self

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    # Results of operations are what they are, not made `ScaledTensor`s.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        return _on_values(func, args, kwargs) if special is None else special(func, *args, **kwargs)

    @property
    def data(self) -> Any:
        """As torch's; what is assigned is rounded to this format, if it is not scaled itself."""
        return torch.Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, new: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # torch's own knows of shape, dtype and device alone, and would leave the numbers as they were.
        if not isinstance(new, ScaledTensor):
            new = quantize(new, casts.format_of(self.codes.dtype), power_of_two=True)
        torch.Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]
        self.codes, self.scale = new.codes, new.scale

    def dequantize(self, dtype: Any = None) -> torch.Tensor:
        """The value as a plain tensor: `codes * scale`, computed in float32 and cast to `dtype`."""
        return (casts.to_float(self.codes) * self.scale).to(dtype or self.dtype)

    def requantize_(self, x: torch.Tensor) -> "ScaledTensor":
        """Takes the values of `x`, of its own shape, in its own format on a fresh power-of-two scale."""
        new = quantize(x, casts.format_of(self.codes.dtype), power_of_two=True)
        self.codes.copy_(new.codes)
        self.scale.copy_(new.scale)
        return _written(self)

    def storage(self) -> Any:
        """Raises RuntimeError, which tells whoever writes safetensors what to save instead."""
        raise RuntimeError(
            "`ScaledTensor`: expected a tensor with memory of its own, as safetensors writes it; got codes "
            "and a scale. Save it with torch.save (in accelerate: safe_serialization=False), or save "
            "`fp8jax_torch.dequantize(model)`."
        )

    def share_memory_(self) -> "ScaledTensor":
        """As torch's, which would crash: it takes the tensor for one with memory of its own."""
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes see what is written."""
        return self.codes.is_shared()

    def __repr__(self, **ignored: Any) -> str:
        name = casts.format_of(self.codes.dtype).name
        return f"ScaledTensor({self.dequantize()!r}, format={name}, scale={self.scale.item():g})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, *ignored: Any) -> "ScaledTensor":
        return ScaledTensor(inner["codes"], inner["scale"], dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (self.codes, self.scale, self.dtype, self.requires_grad, is_parameter)


def _rebuilt(codes: Any, scale: Any, dtype: Any, requires_grad: bool, is_parameter: bool) -> Any:
    """What was pickled."""
    scaled = ScaledTensor(codes, scale, dtype)
    return torch.nn.Parameter(scaled, requires_grad) if is_parameter else scaled.requires_grad_(requires_grad)


# So that `torch.load` gives back what `torch.save` wrote, with its default of loading no code.
torch.serialization.add_safe_globals([_rebuilt])


def quantize(
    x: torch.Tensor, format: Format | str, scale: Any = None, *, margin: int = 0, power_of_two: bool = False
) -> ScaledTensor:
    """Casts `x / scale` to `format`: `fp8jax.quantize`, bit for bit, with one scale for the tensor.

    Args:
        x: floating tensor or `ScaledTensor`, any shape; detached.
        format: format of the codes, or its name.
        scale: float32, shape (). By default the one that maps the largest magnitude of `x` to the
            format's max: current scaling; and at most the one whose largest value is finite.
        margin: binary headroom of the default scale.
        power_of_two: whether the default scale is a power of two.

    Raises:
        TypeError: `x` is not a floating tensor, or `format` is no format.
        ValueError: the format is E8M0, which is one of scales, or is not known.
    """
    format = formats.parse(format)
    if not x.is_floating_point():
        raise TypeError(f"`x`: expected a floating tensor to quantize; got {x.dtype}.")
    if format == formats.E8M0:
        raise ValueError("`format`: expected a format of tensors; got E8M0, which is one of scales.")
    dtype, x = x.dtype, value(x.detach()).float()
    if scale is None:
        scale = casts.scale_of(casts.amax(x), format.max, margin=margin, power_of_two=power_of_two)
        scale = scale.clamp(max=float(largest_scale(format.max, power_of_two=power_of_two)))
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return ScaledTensor(casts.cast(x * (1 / scale), format), scale, dtype)


def quantize_gradient(x: torch.Tensor) -> ScaledTensor:
    """A weight gradient in E4M3 on a power-of-two scale of its own; what is infinite becomes NaN."""
    return quantize(casts.without_infinities(value(x)), formats.E4M3, power_of_two=True)


def is_scaled(x: Any) -> bool:
    """Whether `x` is a `ScaledTensor`."""
    return isinstance(x, ScaledTensor)


def value(x: Any) -> Any:
    """`x` dequantized if it is a `ScaledTensor`, else `x` itself."""
    return x.dequantize() if isinstance(x, ScaledTensor) else x


def _written(x: ScaledTensor) -> ScaledTensor:
    """`x`, of whose parts a write is counted: below autograd torch does not, and a backward may need them."""
    torch.autograd.graph.increment_version((x.codes, x.scale))
    return x


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Any operation, on values; what it writes is rounded again."""
    written: list[tuple[ScaledTensor, torch.Tensor]] = []

    def plain(x: Any, is_written: bool) -> Any:
        if not isinstance(x, ScaledTensor):
            return x
        dense = x.dequantize()
        if is_written:
            written.append((x, dense))
        return dense

    def every(tree: Any, argument: Any) -> Any:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        return pytree.tree_map(lambda x: plain(x, is_written), tree)

    schema = func._schema.arguments
    by_name = {argument.name: argument for argument in schema}
    new_args = [every(arg, argument) for arg, argument in zip(args, schema, strict=False)]
    new_kwargs = {name: every(arg, by_name[name]) for name, arg in kwargs.items()}
    out = func(*new_args, **new_kwargs)
    for scaled, dense in written:
        scaled.requantize_(dense)
    scaled_of = {id(dense): scaled for scaled, dense in written}
    return pytree.tree_map(lambda x: scaled_of.get(id(x), x), out)


def _mapped(function: Any) -> Any:
    """A special case that does `function` to codes and scale."""
    return lambda func, x, **kwargs: ScaledTensor(function(x.codes), function(x.scale), x.dtype)


def _to_copy(func: Any, x: ScaledTensor, **kwargs: Any) -> torch.Tensor:
    """A move to a device stays scaled; a cast to another dtype gives plain values."""
    if kwargs.get("dtype") not in (None, x.dtype):
        return func(x.dequantize(), **kwargs)
    to = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
    return ScaledTensor(x.codes.to(**to, copy=True), x.scale.to(**to, copy=True), x.dtype)


def _copy(func: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, ScaledTensor):
        return func(x, value(source), non_blocking)
    if isinstance(source, ScaledTensor) and source.codes.dtype == x.codes.dtype:
        x.codes.copy_(source.codes, non_blocking)
        x.scale.copy_(source.scale, non_blocking)
        return _written(x)
    return x.requantize_(value(source).to(x.device).expand(x.shape))


def _times(func: Any, x: Any, factor: Any, **kwargs: Any) -> Any:
    """A number times the value is the number times the scale."""
    is_number = not isinstance(factor, torch.Tensor) or (factor.ndim == 0 and not is_scaled(factor))
    if not isinstance(x, ScaledTensor) or not is_number or kwargs:
        return _on_values(func, (x, factor), kwargs)
    func(x.scale, factor)
    return _written(x)


def _times_each(func: Any, tensors: Any, factor: Any) -> None:
    """`_times` of a list, as `clip_grad_norm_(foreach=True)` has it."""
    for x in tensors:
        x.mul_(factor)


def _zero(func: Any, x: ScaledTensor) -> ScaledTensor:
    x.codes.view(torch.uint8).zero_()
    x.scale.fill_(1)
    return _written(x)


def _like(func: Any, x: ScaledTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor; the values of `x` are not looked at."""
    return func(x.scale.to(x.dtype).expand(x.shape), *args, **kwargs)


_SPECIAL: dict[Any, Any] = {
    _aten.detach.default: _mapped(torch.Tensor.detach),
    _aten.alias.default: _mapped(torch.Tensor.detach),
    _aten.clone.default: _mapped(torch.clone),
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.zero_.default: _zero,
    _aten.mul_.Tensor: _times,
    _aten.mul_.Scalar: _times,
    _aten.div_.Tensor: _times,
    _aten.div_.Scalar: _times,
    _aten._foreach_mul_.Tensor: _times_each,
    _aten._foreach_mul_.Scalar: _times_each,
    **{
        func: _like
        for func in (
            _aten.empty_like.default,
            _aten.zeros_like.default,
            _aten.ones_like.default,
            _aten.full_like.default,
            _aten.new_empty.default,
            _aten.new_zeros.default,
            _aten.new_ones.default,
            _aten.new_full.default,
        )
    },
}
