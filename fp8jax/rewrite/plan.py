"""The plan of the dot products that `evaluate` replaces, their kernels' formats and their scaling states."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.dot import init_ragged_state, init_state
from fp8jax.quantization import is_scaled, quantize
from fp8jax.recipe import Recipe
from fp8jax.rewrite.dots import Dot, Site
from fp8jax.variables import SCALING

# The `checkpoint_name` of the outputs of kernels' dot products.
DOT_OUTPUT = "fp8jax_dot_output"


@dataclasses.dataclass(frozen=True)
class PlannedDot:
    """A dot product to replace, with its recipe."""

    dot: Dot
    key: tuple[str, ...]  # key of its scaling state
    recipe: Recipe

    @property
    def path(self) -> tuple[str, ...]:
        """The path of its parameter."""
        assert self.dot.path is not None
        return self.dot.path

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes of the parameter with a scale for each index: layers, then experts."""
        layers = tuple(length for _, length in self.dot.loops)
        return (*layers, self.dot.groups) if self.dot.groups else layers

    def kernel(self, leaf: Any) -> "Kernel":
        """The parameter `leaf` as a kernel."""
        return Kernel(self.recipe, len(leaf.shape) - len(self.stack), self.dot.groups)

    def first_state(self) -> dict[str, jax.Array]:
        """The initial scaling state, with a leading axis for each scan that slices the kernel."""
        state = first_state(self.recipe, self.dot.groups, tuple(length for _, length in self.dot.loops))
        if self.key != self.path:
            state.pop("wgrad_scale", None)  # the parameter has one gradient
        return state

    def state_in(self, states: Mapping[str, Any]) -> Any:
        """The scaling state among nested dicts of states; {} if it has none.

        Raises:
            ValueError: `states` lack it.
        """
        if self.recipe.gemm != "FP8" or not self.first_state():
            return {}
        # States that `merge` merged by max have the parameter's own key.
        for key in (self.key, self.path):
            found: Any = states
            for name in key:
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        raise ValueError(
            f"`variables`: expected the scaling state of {'/'.join(self.path)!r} in the collection "
            f"{SCALING!r}; got none. Take it from `model.init(...)`, and give `apply` all of the variables, "
            "not 'params' alone."
        )


class Kernel(NamedTuple):
    """A kernel of a model with scaling states from `init`, before its dot products are traced."""

    recipe: Recipe
    rank: int  # rank of the array that one scale covers
    groups: int  # number of experts; 0 without experts

    @property
    def parts(self) -> list[str]:
        """The names of the arrays of its scaling state."""
        return list(first_state(self.recipe, self.groups, ()))

    def first_state(self, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """The initial scaling state; `shape` may have leading axes of stacked layers."""
        stack = shape[: len(shape) - self.rank - bool(self.groups)]
        return first_state(self.recipe, self.groups, stack)

    def in_format(self, x: Any, format: str | None = None) -> Any:
        """The kernel `x` in a storage format, by default its recipe's; scales are powers of two, one for each
        layer and expert."""
        format = format or self.recipe.weight
        if is_scaled(x) or format == "FP32":
            return x
        if format == "BF16":
            return x.astype(jnp.bfloat16)
        blocks = (*x.shape[: x.ndim - self.rank], *(1,) * self.rank)
        q = quantize(x, formats.get(format), power_of_two=True, blocks=blocks)
        return q.with_own_dtype(x.dtype)


def first_state(recipe: Recipe, groups: int, stack: tuple[int, ...]) -> dict[str, jax.Array]:
    """The initial scaling state of a kernel, or of `groups` kernels; `stack` are axes of stacked layers."""
    if recipe.gemm != "FP8":
        return {}
    state = init_ragged_state(recipe, groups) if groups else init_state(recipe)
    # On a mesh with explicit axes the copy has the same type as the states that a step returns.
    return {name: jnp.copy(jnp.broadcast_to(x, (*stack, *x.shape))) for name, x in state.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The dot products of a jaxpr to replace, and how.

    Attributes:
        dots: the dot products to replace, by site.
        below: sites of all equations around them, around named dot products, or around calls of transformed
            functions.
        sliced: for each scan, by site, the dot products of the parameters that it slices, by state key.
        named: parameter paths of the dot products that get a named scope, by site.
        backend: the GEMM backend.
        lora_scale: alpha / rank of adapters.
    """

    dots: dict[Site, PlannedDot]
    below: frozenset[Site]
    sliced: dict[Site, dict[tuple[str, ...], PlannedDot]]
    named: dict[Site, tuple[str, ...]]
    backend: str
    lora_scale: float

    @classmethod
    def of(
        cls,
        dots: Iterable[PlannedDot],
        named: Iterable[Dot] = (),
        programs: Iterable[Site] = (),
        backend: str = "auto",
        lora_scale: float = 1.0,
    ) -> "Plan":
        """Makes a plan; `programs` are sites of calls of transformed functions, with plans of their own."""
        by_site = {each.dot.place.site: each for each in dots}
        names = {dot.place.site: dot.path for dot in named if dot.path is not None}
        below = {site[:n] for site in (*by_site, *programs, *names) for n in range(1, len(site))}
        sliced: dict[Site, dict[tuple[str, ...], PlannedDot]] = {}
        for each in by_site.values():
            for site, _ in each.dot.loops:
                sliced.setdefault(site, {})[each.key] = each
        return cls(by_site, frozenset(below), sliced, names, backend, lora_scale)

    def kernels(self) -> dict[tuple[str, ...], PlannedDot]:
        """The kernels by path, each with its dot product inside the most scans, which decides the number of
        scales."""
        kernels: dict[tuple[str, ...], PlannedDot] = {}
        for each in self.dots.values():
            if each.path not in kernels or len(kernels[each.path].dot.loops) < len(each.dot.loops):
                kernels[each.path] = each
        return kernels
