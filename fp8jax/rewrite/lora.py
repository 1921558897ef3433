"""Low-rank adapters (LoRA) for layers with frozen kernels.

    y = x W + (alpha / rank) (x A) B        W frozen, A (inputs, rank) random, B (rank, outputs) zero

    model = fp8jax.transform(module, "O2", lora=fp8jax.LoRA(rank=8, alpha=16.0))

"Inputs" are the kernel's contracted axes, which must come first, flattened; "outputs" are the other axes,
flattened. A stack of scanned layers has a stack of A and B.

References:
    LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685, section 4.1.
"""

import dataclasses
import functools
import math
import numbers
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from fp8jax.dot.layout import Layout
from fp8jax.quantization import format_of, is_scaled, own_value, value
from fp8jax.recipe import Recipe
from fp8jax.rewrite.plan import Kernel
from fp8jax.rewrite.rules import Layer, layer_matches, layer_names, matches
from fp8jax.scaling import of_recipe

# The names of a layer's adapters, beside its kernel.
A, B = "lora_a", "lora_b"

# What a layer needs to have adapters.
_NEEDS = (
    "They need a matmul that the recipe does not exclude; the kernel must be a parameter of the layer, with "
    "its contracted axes first and no batch axis, and no other operation may read it."
)

_FORMATS = ("E4M3", "FP16", "BF16", "FP32")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """The layers with adapters, and the format of the frozen kernels.

    Attributes:
        rank: rank of the adapters. Any rank works, because the adapters' matmuls are not FP8.
        alpha: the adapters' output is multiplied by alpha / rank.
        targets: layers with adapters, as shell-style patterns (see `Rule`); None for all layers that the
            recipe includes and that can have adapters.
        weight: format of the frozen kernels: E4M3, FP16 (both with a power-of-two scale per tensor), BF16 or
            FP32. None is E4M3 for layers with FP8 GEMMs and FP32 for others. Under block scaling None stores
            kernels of whole blocks as codes and scales of their GEMM, and other kernels in E4M3.
        seed: random seed of A, for an NNX module; a Linen model's `init` has a key.

    Raises:
        ValueError: a value is not legal.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | None = None
    weight: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"`rank`: expected a positive integer; got {self.rank!r}.")
        if not isinstance(self.alpha, numbers.Real) or not 0 < self.alpha < math.inf:
            raise ValueError(f"`alpha`: expected a positive number; got {self.alpha!r}.")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"`seed`: expected an integer from 0 on; got {self.seed!r}.")
        if self.weight not in (None, *_FORMATS):
            raise ValueError(f"`weight`: expected None or one of {', '.join(_FORMATS)}; got {self.weight!r}.")
        is_tuple = isinstance(self.targets, tuple) and self.targets != ()
        if self.targets is not None and not (is_tuple and all(isinstance(x, str) for x in self.targets)):
            raise ValueError(
                f"`targets`: expected a tuple of patterns, or None for all layers; got {self.targets!r}."
            )

    def chooses(self, path: str, parameter: str, recipe: Recipe) -> bool:
        """Whether a layer that can have adapters gets them; `parameter` is the path of its kernel."""
        layer = Layer(path, None, (), parameter=parameter)

        def fits(patterns: Sequence[str]) -> bool:
            return any(layer_matches(pattern, layer) for pattern in patterns)

        if self.targets is not None:
            return fits(self.targets)
        return fits(recipe.include) and not fits(recipe.exclude)

    def check(self, able: Sequence[str], unable: Sequence[str]) -> None:
        """Raises ValueError if a target matches no layer, or a layer that cannot have adapters; or if `able`
        is empty."""
        for pattern in self.targets or ():
            for path in unable:
                if matches(pattern, path):
                    raise ValueError(
                        f"`lora`: layer {path!r}, matched by the target {pattern!r}, cannot have adapters. "
                        + _NEEDS
                    )
            if not any(matches(pattern, path) for path in able):
                raise ValueError(
                    f"`lora`: the target {pattern!r} matches no layer; the layers are {', '.join(able)}."
                )
        if not able:
            raise ValueError(f"`lora`: the model has no layer that can have adapters. {_NEEDS}")

    def new(
        self, key: PRNGKeyArray, path: str, stack: tuple[int, ...], gemm: tuple[int, int, int]
    ) -> dict[str, Float[Array, "..."]]:
        """The adapters of a layer: A normal with variance 1 / inputs, B zero; float32.

        Args:
            key: the model's random key; the layer's path is folded in.
            path: the layer's path.
            stack: leading axes of a stack of layers.
            gemm: rows, inputs and outputs of one layer's matmul.
        """
        _, inputs, outputs = gemm
        key = jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
        a = jax.random.normal(key, (*stack, inputs, self.rank)) * inputs**-0.5
        return {A: a, B: jnp.zeros((*stack, self.rank, outputs))}

    def freeze(self, x: Any, kernel: Kernel, inputs: int | None) -> Any:
        """The frozen kernel `x` in its storage format; `inputs` is the size of its contracted axes, None if
        they do not come first."""
        format = self.weight or ("E4M3" if kernel.recipe.is_quantized else "FP32")
        # A trained model's weights, which may be in FP16; FP8 codes of a checkpoint stay as they are.
        if is_scaled(x) and (self.weight or x.data.dtype == jnp.float16) and format != format_of(x).name:
            x = own_value(x)
        if self.weight is None and kernel.recipe.is_quantized and inputs is not None and not is_scaled(x):
            q = of_recipe(kernel.recipe).stored(x, kernel.layers, inputs)
            if q is not None:
                return q
        return kernel.in_format(x, format)

    def at(self, adapters: Any, path: tuple[str, ...]) -> "Adapters | None":
        """The adapters of the kernel at a path, stored at its layer's path; None without adapters."""
        for names in (path, layer_names(path)):
            found = adapters
            for name in names:
                found = found.get(name) if isinstance(found, Mapping) else None
            if isinstance(found, Mapping) and A in found:
                return Adapters(found[A], found[B], self.alpha / self.rank)
        return None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("a", "b"), meta_fields=("scale",))
@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a kernel, which add to the output of its dot product."""

    a: Any  # shape=(..., inputs, rank), float32
    b: Any  # shape=(..., rank, outputs), float32
    scale: float

    @property
    def depth(self) -> int:
        """The number of leading axes, of stacked layers."""
        return self.a.ndim - 2

    def output(
        self, lhs: jax.Array, kernel: Any, dimension_numbers: lax.DotDimensionNumbers, *, dtype: Any
    ) -> jax.Array:
        """`scale * (x A) B`, in `dtype`."""
        layout = Layout.of(lhs.shape, kernel.shape, dimension_numbers)
        x, a, b = (each.astype(dtype) for each in (lhs, self.a, self.b))
        return (self.scale * ((layout.lhs.to_matrix(x) @ a) @ b)).reshape(layout.out_shape)

    def merged(self, kernel: Any, times: float = 1.0) -> Float[Array, "..."]:
        """`kernel + times scale A B`, float32."""
        product = jnp.matmul(self.a, self.b, precision="highest")
        return value(kernel).astype(jnp.float32) + times * self.scale * product.reshape(kernel.shape)
