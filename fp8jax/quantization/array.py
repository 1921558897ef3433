"""`ScaledArray`: codes and their scale as one pytree node."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fp8jax.formats import ALL, E4M3, E8M0, Format
from fp8jax.quantization.exported import stored_by_export
from fp8jax.quantization.packed import PackedE2M1
from fp8jax.quantization.rounding import from_bytes, to_bytes

_BITS = {
    jnp.dtype(jnp.float32): jnp.dtype(jnp.uint32),
    jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16),
    jnp.dtype(E8M0.dtype): jnp.dtype(jnp.uint8),
}
_FLOATS = {bits: float for float, bits in _BITS.items()}

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def _bitcast(x: Any, dtypes: Any) -> Any:
    """The bits of an array in another dtype of the same width; other leaves, such as shardings, unchanged."""
    if not isinstance(x, _ARRAYS) or x.dtype not in dtypes:
        return x
    dtype = dtypes[x.dtype]
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return lax.bitcast_convert_type(x, dtype) if isinstance(x, jax.Array) else x.view(dtype)


class _Scale:
    """The attribute `scale` of a `ScaledArray`, which stores the scale's bits."""

    def __get__(self, array: Any, cls: Any = None) -> Any:
        if array is None:
            raise AttributeError("scale")  # the dataclass field has no default
        if isinstance(array.bits, _ARRAYS) and array.bits.dtype not in _FLOATS:
            raise TypeError(f"something changed codes and scales apart of {array.remedy}.")
        return _bitcast(array.bits, _FLOATS)

    def __set__(self, array: Any, scale: Any) -> None:
        is_of_array = hasattr(array.data, "dtype")  # else an integer may be an axis of `vmap`
        is_number = isinstance(scale, float) or (is_of_array and isinstance(scale, int))
        bits = vars(array)["bits"] = _bitcast(jnp.float32(scale) if is_number else scale, _BITS)
        if is_of_array and isinstance(bits, _ARRAYS) and bits.dtype not in _FLOATS:
            raise _illegal(array.data, bits.dtype, bits.shape)


def _illegal(data: Any, dtype: Any, blocks: tuple[int, ...]) -> ValueError:
    """The error of a `ScaledArray` of `data` with a scale of this dtype and shape."""
    return ValueError(
        "`ScaledArray`: expected floating data and a float32 scale, scalar or of the data's rank with dims "
        f"that divide the data's; got data {data.dtype}{list(data.shape)}, scale {dtype}{list(blocks)}."
    )


def _of_value(name: str) -> Callable[..., Any]:
    """The value's method of this name; it dequantizes `ScaledArray`s among its arguments, too."""

    def method(array: Any, *args: Any, **options: Any) -> Any:
        return getattr(array.dequantize(), name)(*map(value, args), **options)

    return method


def _equality(name: str) -> Callable[..., Any]:
    """The value's `==` or `!=`; of objects where trees have no arrays, as of shapes or shardings."""
    of_value = _of_value(name)

    def method(array: Any, other: Any) -> Any:
        are_arrays = all(hasattr(x.data, "astype") for x in (array, other) if isinstance(x, ScaledArray))
        return of_value(array, other) if are_arrays else NotImplemented

    return method


@stored_by_export
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray:
    """An array of low-precision codes with a scale: `value = data * scale`.

        ScaledArray(data, scale)

    Tree functions see two leaves: the codes, and the bits of the scale as unsigned integers. Arithmetic on
    both leaves, as in `jax.tree.map(lambda w: 0.5 * w, params)`, would quarter the value. Such arithmetic
    turns the bits into floats, and reading the scale then raises. Operations that keep integers (sums,
    negation, integer factors) make the next loss of a model with such a parameter NaN. Of differences of
    parameters with different scales only half are detected, and nothing detects what leaves codes and bits
    valid: a comparison, small noise, a norm by way of float32.

    Invariants (checked by `validate`):
        `data` has a floating dtype and any shape;
        `scale` is float32. It is a scalar, or has `data`'s rank and dims that divide `data`'s dims; each
        entry scales one block. A bfloat16 scale, a power of two, marks a parameter that is bfloat16 in its
        model. GEMM operands in blocks (see `quantize_blocks`), and frozen kernels stored as such, may have
        E8M0 scales, or scales that are a `ScaledArray`; its codes are bfloat16 to mark such a parameter.

    Operators (+ - * / ** @ negation, abs), `sum`, `mean`, `reshape`, `transpose`, `T`, indexing and iteration
    dequantize, and return float32 arrays; `x[...]` is the array itself. Comparisons (== != < <= > >=) are of
    the value's entries, and return bool arrays; the hash is of the object. `len` and `bool` are the value's.
    For other reductions call `dequantize` first.

    Raises:
        ValueError: the scale is an array of another dtype. A number becomes float32.
    """

    data: Any
    scale: Any = _Scale()

    remedy: ClassVar[str] = (
        "a scaled array: its leaves take no arithmetic. Do it with the plain parameters that "
        "`model.dequantize` gives, or with `is_leaf=fp8jax.quantization.is_scaled`, which makes it one leaf"
    )

    def tree_flatten_with_keys(self) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        data, scale = map(jax.tree_util.GetAttrKey, ("data", "scale"))
        return ((data, self.data), (scale, self.bits)), None

    def tree_flatten(self) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return (self.data, self.bits), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        del aux
        new = object.__new__(cls)
        vars(new)["data"], vars(new)["bits"] = children
        return new

    @property
    def bits(self) -> Any:
        """The bits of the scale as unsigned integers: the second leaf."""
        return self.__dict__["bits"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Rank of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of the scales."""
        return int(self.data.nbytes + self.bits.nbytes)

    @property
    def own_dtype(self) -> Any:
        """The dtype of the parameter in its model, bfloat16 or float32."""
        scale = self.scale.data if isinstance(self.scale, ScaledArray) else self.scale
        return jnp.dtype(jnp.bfloat16 if scale.dtype == jnp.bfloat16 else jnp.float32)

    def with_own_dtype(self, dtype: Any) -> "ScaledArray":
        """The same codes with a bfloat16 scale if `dtype` is bfloat16, else an E8M0 or float32 scale. Scales
        must be powers of two, or E4M3 ones of blocks."""
        scale, is_bf16 = self.scale, dtype == jnp.bfloat16
        if isinstance(scale, ScaledArray):
            of_blocks = scale.data.astype(jnp.bfloat16 if is_bf16 else E4M3.dtype)
            return ScaledArray(self.data, ScaledArray(of_blocks, scale.scale))
        if not is_bf16 and scale.dtype == E8M0.dtype:
            return self
        return ScaledArray(self.data, scale.astype(jnp.bfloat16 if is_bf16 else jnp.float32))

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        """The value, `data * scale`, computed in float32 and cast to `dtype`.

        Raises:
            ValueError: codes and scale do not fit, as from `jax.vmap(quantize)`.
        """
        return (self.data.astype(jnp.float32) * expand(self.scale, self.shape)).astype(dtype)

    def validate(self) -> "ScaledArray":
        """Returns itself.

        Raises:
            ValueError: an invariant is broken; names both shapes.
        """
        shape, blocks = self.shape, tuple(self.bits.shape)
        if isinstance(self.bits, ScaledArray):
            dtype = self.bits.validate().scale.dtype
        else:
            dtype = _FLOATS.get(self.bits.dtype, self.bits.dtype)
        fits = not blocks or (
            len(blocks) == len(shape)
            and all(b == d or (b and d % b == 0) for d, b in zip(shape, blocks, strict=True))
        )
        is_float = jnp.issubdtype(self.data.dtype, jnp.floating)
        is_float = is_float and dtype in _BITS
        if not (fits and is_float):
            raise _illegal(self.data, dtype, blocks)
        return self

    # Without this NumPy calls the operators below element by element.
    __array_ufunc__ = None

    def __jax_array__(self) -> jax.Array:
        return self.dequantize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.dequantize(), dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        """Itself for `...`, else the indexed dequantized value."""
        return self if index is ... else self.dequantize()[index]

    def __setitem__(self, index: Any, new: Any) -> None:
        raise TypeError(
            "a ScaledArray cannot be changed in place: make a new one; for an NNX parameter call "
            "`param.set_value(fp8jax.quantization.quantize_like(array, param.get_value()))`."
        )

    @property
    def T(self) -> jax.Array:
        """The value, transposed."""
        return self.dequantize().T

    def astype(self, dtype: Any) -> jax.Array:
        """The value in another dtype."""
        return self.dequantize(dtype)

    # The methods and operators of the value. Without `__iter__` a loop has no end: JAX clamps indices.
    __iter__, __len__, __bool__ = map(_of_value, ("__iter__", "__len__", "__bool__"))
    reshape, transpose, sum, mean = map(_of_value, ("reshape", "transpose", "sum", "mean"))
    __add__, __radd__, __sub__, __rsub__ = map(_of_value, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __mul__, __rmul__, __pow__ = map(_of_value, ("__mul__", "__rmul__", "__pow__"))
    __truediv__, __rtruediv__ = map(_of_value, ("__truediv__", "__rtruediv__"))
    __matmul__, __rmatmul__ = map(_of_value, ("__matmul__", "__rmatmul__"))
    __eq__, __ne__ = map(_equality, ("__eq__", "__ne__"))  # pyright: ignore[reportAssignmentType]
    __lt__, __le__, __gt__, __ge__ = map(_of_value, ("__lt__", "__le__", "__gt__", "__ge__"))
    __hash__ = object.__hash__
    __abs__, __neg__ = map(_of_value, ("__abs__", "__neg__"))


# The bits of the scale 2**64. Scales of parameters are smaller. The sum of the bits of two is larger, if both
# are at least 2**-31.
_TOO_LARGE = {jnp.dtype(jnp.uint32): 0x5F80_0000, jnp.dtype(jnp.uint16): 0x5F80}


def checked_parameter(x: Any) -> Any:
    """A parameter, with a NaN scale if a sum, an integer factor or a negation changed the bits of its scale.

    A lower bound would find more differences, but costs a kernel for each parameter in programs for GPUs.
    """
    if not isinstance(x, ScaledArray) or getattr(x.bits, "dtype", None) not in _TOO_LARGE:
        return x
    return ScaledArray(x.data, jnp.where(x.bits < _TOO_LARGE[x.bits.dtype], x.scale, jnp.nan))


def is_scaled(leaf: Any) -> bool:
    """Whether `leaf` is a `ScaledArray`: the `is_leaf` of tree functions."""
    return isinstance(leaf, ScaledArray)


def format_of(x: Any) -> Format:
    """The format of an array, or of a `ScaledArray`'s codes."""
    dtype = x.data.dtype if is_scaled(x) else x.dtype
    return next(format for format in ALL if format.dtype == dtype)


def value(x: Any) -> Any:
    """A `ScaledArray` dequantized to float32; other values unchanged."""
    return x.dequantize() if isinstance(x, ScaledArray) else x


def own_value(x: Any) -> Any:
    """A `ScaledArray` dequantized to its dtype in the model; other values unchanged."""
    return x.dequantize(x.own_dtype) if isinstance(x, ScaledArray) else x


def with_float32_scales(tree: Any) -> Any:
    """The tree with float32 scales in its `ScaledArray`s."""

    def widened(x: Any) -> Any:
        return x.with_own_dtype(jnp.float32) if isinstance(x, ScaledArray) else x

    return jax.tree.map(widened, tree, is_leaf=lambda x: isinstance(x, ScaledArray))


def expand(scale: Any, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """`scale`, a scalar or one entry per block, in a shape that broadcasts against `shape`; float32.

    Raises:
        ValueError: `scale` has dims, but another rank than `shape`.
    """
    scale = jnp.asarray(value(scale)).astype(jnp.float32)
    if scale.ndim not in (0, len(shape)):
        blocks = (*scale.shape, *(1,) * (len(shape) - scale.ndim))
        raise ValueError(
            f"`ScaledArray`: expected a scalar scale, or a scale of the codes' rank; got shape {scale.shape} "
            f"for codes {tuple(shape)}. If it is from `jax.vmap(quantize)`, dequantize within the vmap, or "
            f"quantize the whole array with blocks={blocks}."
        )
    if scale.ndim:
        for axis, (blocks, dim) in enumerate(zip(scale.shape, shape, strict=True)):
            if blocks not in (1, dim):
                scale = jnp.repeat(scale, dim // blocks, axis)
        return scale
    return scale.reshape((1,) * len(shape))


def on_data(function: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """`function` of an array, or of the codes of a `ScaledArray`."""
    return ScaledArray(function(x.data), x.scale) if is_scaled(x) else function(x)


def as_bytes(q: Any) -> Any:
    """A `ScaledArray` with its codes as bytes; packed codes and float arrays stay unchanged.

    XLA on CPU slices and stacks float8 arrays by way of float16, so residuals and slices are bytes.
    """
    if not is_scaled(q) or isinstance(q.data, PackedE2M1):
        return q
    return ScaledArray(to_bytes(q.data), q.scale)


def as_codes(q: Any, format: Format) -> Any:
    """The inverse of `as_bytes`."""
    if not is_scaled(q) or isinstance(q.data, PackedE2M1):
        return q
    return ScaledArray(from_bytes(q.data, format), q.scale)
