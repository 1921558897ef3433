"""Low-rank adapters (LoRA) for layers with frozen kernels.

    y = x W + (alpha / rank) (x A) B        W frozen, A (inputs, rank) random, B (rank, outputs) zero

    model = fp8jax.transform(module, "O2", lora=fp8jax.LoRA(rank=8, alpha=16.0))

"Inputs" are the kernel's contracted axes, which must come first, flattened; "outputs" are the other axes,
flattened. A stack of scanned layers has a stack of A and B.

References:
    LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685, section 4.1.
"""

import dataclasses
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
from fp8jax.rewrite.interpreter.param_view import names_of
from fp8jax.rewrite.patterns import WEIGHTS, Layer, layer_matches, layer_path, matches
from fp8jax.rewrite.plan import Kernel, PlannedDot
from fp8jax.scaling import of_recipe

Path = tuple[str, ...]

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

    def of_kernels(
        self,
        adapters: Any,
        kernels: Mapping[Path, tuple[int, ...]],
        known: Mapping[Path, PlannedDot | None],
        recipe: Recipe,
        is_complete: bool = True,
    ) -> dict[Path, "Adapters"]:
        """The adapters by the path of their kernel.

        Args:
            adapters: the tree of adapters, each pair at its kernel's path or its layer's.
            kernels: the shapes of the parameters that may have adapters.
            known: kernels of a trace; None for one that has no adapters. See `TracedFunction.adapted`.
            recipe: the model's recipe.
            is_complete: whether all of `known` must have adapters.

        Raises:
            ValueError: adapters are missing or unexpected, or have another rank or shape.
        """
        given = _by_layer(adapters)

        def is_chosen(path: Path) -> bool:
            if path in known:
                return known[path] is not None
            names = "/".join(path)
            return any(self.chooses(layer, names, recipe) for layer in (names, layer_path(path)))

        found: dict[Path, Adapters] = {}
        for path in sorted(filter(is_chosen, kernels), key=lambda path: path not in known):
            # An NNX module that is a layer itself has its adapters at ().
            places = (path, path[:-1]) if path[-1:] and path[-1] in WEIGHTS else (path,)
            at = next((place for place in places if {A, B} == {*given.get(place, ())}), None)
            if at is not None:
                pair = given.pop(at)
                found[path] = Adapters(pair[A], pair[B], self.alpha / self.rank)
                found[path].check("/".join(path), self.rank, kernels[path], known.get(path))
        if given:
            raise ValueError(
                "`lora`: expected adapters of layers that `targets` choose and whose kernels only matmuls "
                f"over their first axes read; got unexpected ones for {'/'.join(next(iter(given)))!r}. Take "
                "adapters of the same `targets`, or leave the layer out of `targets`."
            )
        missing = [path for path, each in known.items() if each and path not in found]
        if is_complete and (missing or not found):
            expected = f"for {'/'.join(missing[0])!r}" if missing else "of the layers that `targets` choose"
            raise ValueError(
                f"`lora`: expected adapters {expected}; got none. Take them from `init` or `adapt` of a "
                "model with the same `targets`."
            )
        return found


def _by_layer(adapters: Any) -> dict[Path, dict[str, Any]]:
    """A tree's A and B by the path of their layer or kernel; other leaves are the user's own parameters."""
    found: dict[Path, dict[str, Any]] = {}
    flat = jax.tree.leaves_with_path(adapters, is_leaf=is_scaled)
    for (*layer, name), (_, leaf) in zip(names_of([path for path, _ in flat]), flat, strict=True):
        if name in (A, B):
            found.setdefault(tuple(layer), {})[name] = leaf
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a kernel, which add to the output of its dot product."""

    a: Any  # shape=(..., inputs, rank), float32
    b: Any  # shape=(..., rank, outputs), float32
    scale: float = dataclasses.field(metadata={"static": True})

    def check(self, path: str, rank: int, kernel: tuple[int, ...], planned: PlannedDot | None = None) -> None:
        """Raises ValueError for another rank, or for shapes that do not fit the kernel or its dot product."""
        a, b = jnp.shape(self.a), jnp.shape(self.b)
        if a[-1:] == b[-2:-1] and a[-1:] not in ((), (rank,)):
            raise ValueError(
                f"`lora`: expected adapters of rank {rank} for {path!r}; got rank {a[-1]}. Transform the "
                "model with the adapters' rank, or take them from `init` or `adapt`."
            )
        # Without a trace: as many stacked axes as A has, and then any split of the others that fits A.
        stack = kernel[: len(planned.kernel.layers) if planned else len(a) - 2]
        sides = kernel[len(stack) :]
        fits = [math.prod(sides[:n]) for n in range(1, len(sides))] or [0]
        inputs = planned.dot.gemm[1] if planned else next((n for n in fits if a[-2:-1] == (n,)), fits[0])
        expected = (*stack, inputs, rank), (*stack, rank, math.prod(sides) // max(inputs, 1))
        if (a, b) != expected:
            raise ValueError(
                f"`lora`: expected {A} of shape {expected[0]} and {B} of shape {expected[1]} for {path!r}; "
                f"got {a} and {b}. Take them from the model's `init` or `adapt`."
            )

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
        """`kernel + times scale A B`, summed in float32.

        A sum is rounded to nearest to the kernel's dtype in the model; a difference is float32.
        """
        product = jnp.matmul(self.a, self.b, precision="highest")
        new = value(kernel).astype(jnp.float32) + times * self.scale * product.reshape(kernel.shape)
        own_dtype = kernel.own_dtype if is_scaled(kernel) else kernel.dtype
        return new.astype(own_dtype) if times > 0 else new
