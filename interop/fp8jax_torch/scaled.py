"""A quantized tensor as a `torch.Tensor`: codes and a scale, `value = codes * scale`.

    >>> import torch
    >>> from fp8jax import formats
    >>> from fp8jax_torch import quantize
    >>> weight = quantize(torch.tensor([0.1, -2.0, 300.0]), formats.E4M3)
    >>> weight.codes.dtype, weight.dtype
    (torch.float8_e4m3fn, torch.float32)
    >>> weight + 1  # arithmetic acts on the value and returns a plain tensor
    tensor([   1.1046,   -1.0089,  301.0000])

It can be a parameter, a gradient, or an entry of a `state_dict`. In-place writes (an optimizer's step,
`grad.add_`, `weight[0] = x`, `load_state_dict`) round on a new power-of-two scale. In-place multiplication
(`clip_grad_norm_`) changes only the scale. Views, as `weight.t()`, are copies that cannot be written.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Shaped
from torch.utils import _pytree as pytree

from fp8jax import formats
from fp8jax.formats import Format
from fp8jax.quantization import largest_scale
from fp8jax_torch import casts
from fp8jax_torch.views import as_views

_aten = torch.ops.aten


class ScaledTensor(torch.Tensor):
    """Codes and their scale: `value = codes * scale`.

    To torch it has the shape and device of the codes, and the dtype of the value that was quantized.

    Attributes:
        codes: any shape, in E4M3, E5M2, FP16 or BF16.
        scale: shape=(), float32.
    """

    codes: Float[torch.Tensor, "..."]
    scale: Float[torch.Tensor, ""]
    # `master_weight` and `rounding` of the optimizer that took the last step, see `optim.written`.
    moved_by: tuple[str, str] | None = None

    @staticmethod
    def __new__(
        cls,
        codes: Float[torch.Tensor, "..."],
        scale: Float[torch.Tensor, ""],
        dtype: torch.dtype = torch.float32,
    ) -> "ScaledTensor":
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

    # Results of operations stay plain tensors.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _OPERATIONS.get(func, _on_values)(func, *args, **(kwargs or {}))

    @property
    def data(self) -> torch.Tensor:
        """As torch's; an assigned plain tensor is rounded to this tensor's format."""
        return torch.Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, new: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # torch's setter only sets shape, dtype and device.
        if not isinstance(new, ScaledTensor):
            new = quantize(new, casts.format_of(self.codes.dtype), power_of_two=True)
        torch.Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]
        self.codes, self.scale = new.codes, new.scale

    def __setitem__(self, index: Any, new: Any) -> None:
        plain = self._dequantize(torch.float32)
        plain[index] = torch.as_tensor(_value(new), dtype=plain.dtype, device=plain.device)
        self.copy_(plain)

    def dequantize(self, dtype: torch.dtype | None = None) -> Float[torch.Tensor, "..."]:
        """The value as a plain tensor, differentiable: `codes * scale`, in float32, cast to `dtype`."""
        is_differentiated = self.requires_grad and torch.is_grad_enabled()
        return _Dequantize.apply(self, dtype) if is_differentiated else self._dequantize(dtype)

    def _dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dequantize` without a gradient, as below autograd."""
        return (casts.to_float(self.codes) * self.scale).to(dtype or self.dtype)

    def requantize_(self, x: Float[torch.Tensor, "..."]) -> "ScaledTensor":
        """Writes the values of `x`, of the same shape, in this format on a new power-of-two scale."""
        new = quantize(x, casts.format_of(self.codes.dtype), power_of_two=True)
        self.codes.copy_(new.codes)
        self.scale.copy_(new.scale)
        return _written(self)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array, not the codes; `numpy.asarray` calls this."""
        return self._dequantize().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        """The values in new memory, as for `numpy`; `from_dlpack` of JAX, NumPy and torch calls this."""
        return self._dequantize().__dlpack__(**options)

    def tolist(self) -> Any:
        """The values as numbers."""
        return self._dequantize().tolist()

    def storage(self) -> Any:
        """Raises RuntimeError, which names the ways to save that do not need a storage."""
        raise RuntimeError(
            "`ScaledTensor`: expected a tensor with a storage, as safetensors needs; got codes and a "
            "scale. Save it with torch.save (in accelerate: safe_serialization=False), or save "
            "`fp8jax_torch.dequantize(model)`."
        )

    def share_memory_(self) -> "ScaledTensor":
        """As torch's: moves codes and scale to shared memory."""
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether codes and scale are in shared memory."""
        return self.codes.is_shared()

    def __repr__(self, **ignored: Any) -> str:
        name = casts.format_of(self.codes.dtype).name
        return f"ScaledTensor({self._dequantize()!r}, format={name}, scale={self.scale.item():g})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, *ignored: Any) -> "ScaledTensor":
        return ScaledTensor(inner["codes"], inner["scale"], dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (self.codes, self.scale, self.dtype, self.requires_grad, is_parameter)


def _rebuilt(codes: Any, scale: Any, dtype: Any, requires_grad: bool, is_parameter: bool) -> Any:
    """The unpickled tensor."""
    scaled = ScaledTensor(codes, scale, dtype)
    return torch.nn.Parameter(scaled, requires_grad) if is_parameter else scaled.requires_grad_(requires_grad)


# `torch.load` loads no code by default, except what is registered here.
torch.serialization.add_safe_globals([_rebuilt])


def quantize(
    x: Shaped[torch.Tensor, "..."],
    format: Format | str,
    scale: float | Float[torch.Tensor, ""] | None = None,
    *,
    margin: int = 0,
    power_of_two: bool = False,
) -> ScaledTensor:
    """Casts `x / scale` to `format`, rounding to nearest even and saturating; NaN stays NaN.

    Bit for bit `fp8jax.quantize` with one scale for the tensor.

    Args:
        x: floating tensor or `ScaledTensor`, any shape; detached.
        format: format of the codes, or its name.
        scale: float32, shape=(), from 2**-126 to 2**126; checked unless it is on a device. By default the
            scale that maps the largest magnitude of `x` to the format's max, and at most `largest_scale`.
        margin, power_of_two: binary headroom of the default scale; whether it is a power of two.

    Raises:
        TypeError: `x` is not a floating tensor, or `format` is not a format.
        ValueError: the format is unknown, or E8M0, E4M4 or E2M1; or the scale is another than above.
    """
    format = formats.get(format)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"`x`: expected a floating tensor to quantize; got {got}.")
    casts.check_format(format)
    dtype, x = x.dtype, _value(x.detach()).float()
    if scale is None:
        scale = casts.scale_of(casts.amax(x), format.max, margin=margin, power_of_two=power_of_two)
        scale = scale.clamp(max=float(largest_scale(format.max, power_of_two=power_of_two)))
    else:
        scale = casts.checked_scale(torch.as_tensor(scale, dtype=torch.float32)).to(x.device)
    return ScaledTensor(casts.cast(x * (1 / scale), format), scale, dtype)


def quantize_gradient(x: Float[torch.Tensor, "..."]) -> ScaledTensor:
    """A weight gradient in E4M3 on a new power-of-two scale; inf becomes NaN."""
    x = _value(x)
    # Saturated, inf would look like a large number.
    return quantize(torch.where(x.isfinite(), x, torch.nan), formats.E4M3, power_of_two=True)


def is_scaled(x: Any) -> TypeGuard[ScaledTensor]:
    """Whether `x` is a `ScaledTensor`."""
    return isinstance(x, ScaledTensor)


def value(x: Any) -> Any:
    """`x` dequantized if it is a `ScaledTensor`, else `x` itself; differentiable."""
    return x.dequantize() if is_scaled(x) else x


def _value(x: Any) -> Any:
    """`value` without a gradient."""
    return x._dequantize() if is_scaled(x) else x


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ScaledTensor, dtype: torch.dtype | None) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x._dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].to(ctx.dtype), None


def _written(x: ScaledTensor) -> ScaledTensor:
    """Returns `x`, and counts a write for the backward's check; below autograd torch does not."""
    torch.autograd.graph.increment_version((x.codes, x.scale))
    return x


def _on_values(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation on dequantized tensors, and quantizes what it writes in place."""
    written: list[tuple[ScaledTensor, torch.Tensor]] = []

    def dequantized(tree: Any, argument: Any) -> Any:
        is_written = argument.alias_info is not None and argument.alias_info.is_write

        def leaf(x: Any) -> Any:
            # FP16 codes have more bits than the bfloat16 of their model.
            is_float32 = is_written and is_scaled(x) and func.overloadpacket in _PROMOTING
            plain = x._dequantize(torch.float32) if is_float32 else _value(x)
            if plain is not x and is_written:
                written.append((x, plain))
            return plain

        return pytree.tree_map(leaf, tree)

    schema = func._schema.arguments
    by_name = {argument.name: argument for argument in schema}
    new_args = [dequantized(arg, argument) for arg, argument in zip(args, schema, strict=False)]
    out = func(*new_args, **{name: dequantized(arg, by_name[name]) for name, arg in kwargs.items()})
    for scaled, plain in written:
        if plain.shape != scaled.shape:
            raise RuntimeError(f"`ScaledTensor`: expected a write that keeps the shape; got {func}.")
        scaled.requantize_(plain)
    scaled_of = {id(plain): scaled for scaled, plain in written}
    return as_views(func, pytree.tree_map(lambda x: scaled_of.get(id(x), x), out))


def _mapped(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., ScaledTensor]:
    """The operation that applies `function` to codes and scale."""
    return lambda func, x, **kwargs: ScaledTensor(function(x.codes), function(x.scale), x.dtype)


def _to_copy(func: Any, x: ScaledTensor, **kwargs: Any) -> torch.Tensor:
    """A move to a device gives a `ScaledTensor`; a cast to another dtype gives a plain tensor."""
    if kwargs.get("dtype") not in (None, x.dtype):
        return func(x._dequantize(), **kwargs)
    to = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
    return ScaledTensor(x.codes.to(**to, copy=True), x.scale.to(**to, copy=True), x.dtype)


def _copy(func: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, ScaledTensor):
        return func(x, _value(source), non_blocking)
    if isinstance(source, ScaledTensor) and source.codes.dtype == x.codes.dtype:
        x.codes.copy_(source.codes, non_blocking)
        x.scale.copy_(source.scale, non_blocking)
        return _written(x)
    return x.requantize_(_value(source).to(x.device).expand(x.shape))


def _rescale(func: Any, x: Any, factor: Any, **kwargs: Any) -> Any:
    """Multiplies or divides by a number: only the scale changes."""
    is_number = not isinstance(factor, torch.Tensor) or (factor.ndim == 0 and not is_scaled(factor))
    if not is_scaled(x) or not is_number or kwargs:
        return _on_values(func, x, factor, **kwargs)
    func(x.scale, factor)
    torch.autograd.graph.increment_version(x.scale)  # not of the codes: a master weight follows the scale
    return x


def _rescale_each(func: Any, tensors: Any, factor: Any) -> None:
    """`_rescale` of a list, for `clip_grad_norm_(foreach=True)`."""
    for x in tensors:
        x.mul_(factor) if func.overloadpacket is _aten._foreach_mul_ else x.div_(factor)


def _zero(func: Any, x: ScaledTensor) -> ScaledTensor:
    (x.codes.view(torch.uint8) if x.codes.itemsize == 1 else x.codes).zero_()
    x.scale.fill_(1)
    return _written(x)


def _like(func: Any, x: ScaledTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor with the shape, dtype and device of `x`."""
    return func(x.scale.to(x.dtype).expand(x.shape), *args, **kwargs)


def _empty_like(func: Any, x: ScaledTensor, **kwargs: Any) -> torch.Tensor:
    """As `_like`, but a `ScaledTensor` for one on "meta", as `Module.to_empty` needs."""
    device = torch.device(kwargs.get("device") or x.device)
    if not x.is_meta or device.type == "meta" or kwargs.get("dtype", x.dtype) != x.dtype:
        return _like(func, x, **kwargs)
    return ScaledTensor(
        torch.empty_like(x.codes, device=device), torch.ones((), dtype=torch.float32, device=device), x.dtype
    )


# Operations that write to float32 from tensors of other dtypes.
_IN_LISTS = "add_ sub_ mul_ div_ addcmul_ addcdiv_ clamp_min_ clamp_max_".split()  # as optimizers write
_PROMOTING = {getattr(_aten, name) for name in (*_IN_LISTS, "clamp_", "masked_fill_")}
_PROMOTING |= {getattr(_aten, f"_foreach_{name}") for name in _IN_LISTS}
_NEW = "zeros_like ones_like full_like new_empty new_zeros new_ones new_full".split()
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _mapped(torch.Tensor.detach),
    _aten.alias.default: _mapped(torch.Tensor.detach),
    _aten.clone.default: _mapped(torch.clone),
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.zero_.default: _zero,
    **{overload: _rescale for op in (_aten.mul_, _aten.div_) for overload in (op.Tensor, op.Scalar)},
    **{
        overload: _rescale_each
        for op in (_aten._foreach_mul_, _aten._foreach_div_)
        for overload in (op.Tensor, op.Scalar)
    },
    **{getattr(_aten, name).default: _like for name in _NEW},
    _aten.empty_like.default: _empty_like,
}
