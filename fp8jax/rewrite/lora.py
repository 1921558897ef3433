"""Low-rank adapters: what of a layer is trained when its kernel is not.

    y = x W + (alpha / rank) (x A) B        W frozen, A (inputs, rank) random, B (rank, outputs) zero

    model = fp8jax.transform(module, "O2", lora=fp8jax.LoRA(rank=8, alpha=16.0))

"Inputs" and "outputs" are the kernel's contracted axes, which must be its first, and its other axes, each
taken as one. A stack of scanned layers has a stack of A and B.

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

from fp8jax import formats
from fp8jax.dot.layout import Layout
from fp8jax.recipe import Recipe
from fp8jax.rewrite.rules import Rule, Rules, layer_names, matches
from fp8jax.scaled import quantize, value

# The names of a layer's adapters, beside its kernel.
A, B = "lora_a", "lora_b"

_FORMATS = ("E4M3", "FP16", "BF16", "FP32")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which layers get adapters, and how the rest of the model is kept.

    Attributes:
        rank: of the adapters; their products stay in the layer's own dtype, so any rank will do.
        alpha: the adapters' product counts alpha / rank times.
        targets: layers that get adapters, as shell-style patterns (see `Rule`); None for all that multiply
            under the recipe and can have some.
        weight: format of the frozen kernels: E4M3, FP16 (both with a power-of-two scale per tensor), BF16 or
            FP32; None for E4M3 where the GEMM is FP8 and for FP32, the levels' weight, where it is not.
        seed: of A, for an NNX module; a Linen model's `init` has a key.

    Raises:
        ValueError: a value that is not legal.
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
        is_pattern = [isinstance(target, str) for target in self.targets or ("",)]
        if isinstance(self.targets, str) or self.targets == () or not all(is_pattern):
            raise ValueError(
                f"`targets`: expected a tuple of patterns, or None for all layers; got {self.targets!r}."
            )

    @property
    def scale(self) -> float:
        """What A B is multiplied with."""
        return self.alpha / self.rank

    def chooses(self, path: str, recipe: Recipe) -> bool:
        """Whether a layer is to have adapters, if it can."""
        if self.targets is not None:
            return any(matches(pattern, path) for pattern in self.targets)
        is_in = any(matches(pattern, path) for pattern in recipe.include)
        return is_in and not any(matches(pattern, path) for pattern in recipe.exclude)

    def check(self, able: Sequence[str], unable: Sequence[str]) -> None:
        """Raises ValueError if a target fits no layer, or one that can have no adapters; or if there is no
        layer at all."""
        for pattern in self.targets or ():
            for path in unable:
                if matches(pattern, path):
                    raise ValueError(
                        f"`lora`: layer {path!r}, which the target {pattern!r} fits, can have no adapters: "
                        "they need a product under the recipe, which its exclude takes from a layer, and a "
                        "kernel whose contracted axes are its first, none of them a batch axis, and that no "
                        "other module computes."
                    )
            if not any(matches(pattern, path) for path in able):
                raise ValueError(
                    f"`lora`: the target {pattern!r} matches no layer; the layers are {', '.join(able)}."
                )
        if not able:
            raise ValueError("`lora`: the model has no layer that can have adapters.")

    def new(self, key: jax.Array, path: str, stack: tuple[int, ...], gemm: tuple[int, int, int]) -> Any:
        """The adapters of a layer: A normal with variance 1 / inputs, B zero; float32.

        Args:
            key: random key of the model; the layer's path is folded in.
            path: of the layer.
            stack: the leading axes of a stack of layers.
            gemm: rows, inputs and outputs of one layer's matrices.
        """
        _, inputs, outputs = gemm
        key = jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
        a = jax.random.normal(key, (*stack, inputs, self.rank)) * inputs**-0.5
        return {A: a, B: jnp.zeros((*stack, self.rank, outputs))}

    def narrow(self, kernel: jax.Array, recipe: Recipe, rank: int) -> Any:
        """A frozen kernel as it is kept.

        Args:
            kernel: of one layer, or of a stack.
            recipe: the layer's.
            rank: that of one layer's kernel.
        """
        name = self.weight or ("E4M3" if recipe.gemm == "FP8" else "FP32")
        if name in ("FP32", "BF16"):
            return kernel if name == "FP32" else kernel.astype(jnp.bfloat16)
        blocks = (*kernel.shape[: kernel.ndim - rank], *(1,) * rank)
        q = quantize(kernel, formats.get(name), power_of_two=True, blocks=blocks)
        return q.with_own_dtype(kernel.dtype)

    def added(self, kernel: Any, adapters: Mapping[str, Any], times: float = 1.0) -> jax.Array:
        """A kernel with its adapters in it, `kernel + times (alpha / rank) A B`, float32."""
        product = jnp.matmul(adapters[A], adapters[B], precision="highest")
        return value(kernel).astype(jnp.float32) + times * self.scale * product.reshape(kernel.shape)


def frozen_rules(recipe: Recipe, rules: tuple[Rule, ...]) -> Rules:
    """A model's rules where kernels are kept by `LoRA.narrow`, and have no gradient."""

    chosen = Rules(recipe, rules)
    chosen.recipe = chosen.recipe.with_plain_weights()
    chosen.recipes = [each.with_plain_weights() for each in chosen.recipes]
    return chosen


def product(scale: float, layout: Layout, lhs: Any, adapters: Mapping[str, Any], dtype: Any) -> jax.Array:
    """What the adapters of one kernel add to its dot product: `scale * (x A) B`, in `dtype`."""
    a, b = (adapters[name].astype(dtype) for name in (A, B))
    thin = (layout.lhs_matrix(lhs.astype(dtype)) @ a) @ b
    return (scale * thin).reshape(layout.out_shape)


def without_adapters(state: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's scaling state, without the adapters beside it."""
    return {name: x for name, x in state.items() if name not in (A, B)}


def adapters_at(adapters: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    """The adapters of the kernel at a path; {} if it has none."""
    found = adapters
    for name in layer_names(path):
        if not (isinstance(found, Mapping) and name in found):
            return {}
        found = found[name]
    return found if isinstance(found, Mapping) and A in found else {}
