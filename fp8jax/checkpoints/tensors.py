"""The tensors of a model as they are exported: with torch's names and shapes, in a serving format.

source = with_kernels(variables, kernels)
for tensor in tensors_of(source, LLAMA, format_of("fp8")):
    tensor.arrays()  # by name
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fp8jax.checkpoints.names import NameMap, Place
from fp8jax.checkpoints.serving import CODES, INPUT, PlainFormat, ServingFormat, encode
from fp8jax.checkpoints.tree import Key, Tree, named
from fp8jax.formats import E4M3
from fp8jax.quantization import BlockMethod, ScaledArray, is_scaled, value
from fp8jax.rewrite import Kernel
from fp8jax.scaling import LHS, RHS, of_recipe
from fp8jax.variables import PARAMS, SCALING, STATISTICS


class ExportRow(NamedTuple):
    """A kernel or a table that was written."""

    name: str  # the layer's in the folder
    is_quantized: bool
    is_unchanged: Any = True  # whether the model multiplies with the same numbers
    sqnr: Any = None  # dB, of a kernel that was quantized for the format


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
