"""The plan of the dot products to replace, with their kernels and states."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.dot import init_ragged_state, init_state, quantized_kernel, state_names
from fp8jax.dot.dot_general import check_state, state_ranks
from fp8jax.quantization import is_scaled, quantize
from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.dots import Dot, Site
from fp8jax.rewrite.interpreter.param_view import transpose
from fp8jax.scaling.old_states import without_unread
from fp8jax.scaling.seeds import with_seeds
from fp8jax.variables import SCALING

# For a scaling state of another recipe.
_REMEDY = (
    "Take it from `model.init(...)`; `model.quantize(plain, like=model.init(...))` keeps trained weights."
)
_REMEDY_OF_NONE = "Take it from `model.init(...)`, and give `apply` all of the variables, not 'params' alone."
_REMEDY_OF_OTHERS = f"Leave it out of {SCALING!r}, or take that collection from `model.init(...)`."


class Kernel(NamedTuple):
    """A parameter of dot products with a recipe: its scales and its scaling state."""

    recipe: Recipe
    layers: tuple[int, ...]  # numbers of stacked layers; each layer has a scale and a state
    groups: int  # number of experts, the first axis of a layer; 0 without experts
    axes: tuple[int, ...] = ()  # the axes of `layers`; () for the first ones
    matrix: tuple[int, ...] = ()  # inputs and outputs of one GEMM, or their product; () if not known

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "Kernel":
        """The inverse of `to_json`, also for older checkpoints, without `matrix`."""
        recipe, layers, groups, axes, *matrix = values
        return cls(Recipe.parse(recipe), tuple(layers), int(groups), tuple(axes), *map(tuple, matrix))

    def to_json(self) -> list[Any]:
        """The kernel as JSON has it."""
        return [str(self.recipe), list(self.layers), self.groups, list(self.axes), list(self.matrix)]

    @property
    def stacked(self) -> tuple[int, ...]:
        """The axes of `layers`."""
        return self.axes or tuple(range(len(self.layers)))

    @property
    def is_stacked_in_front(self) -> bool:
        """Whether the axes of `layers` are the first ones."""
        return self.stacked == tuple(range(len(self.layers)))

    def rank(self, x: Any) -> int:
        """The rank of the part of the parameter `x` that one scale covers."""
        return x.ndim - len(self.layers) - bool(self.groups)

    def first_state(self, key: Iterable[Any]) -> dict[str, jax.Array]:
        """The initial scaling state of its dot product with this key."""
        if not self.recipe.is_quantized:
            return {}
        state = init_ragged_state(self.recipe, self.groups) if self.groups else init_state(self.recipe)
        # On a mesh with explicit axes the copy has the same type as the states that a step returns.
        copies = {name: jnp.copy(jnp.broadcast_to(x, (*self.layers, *x.shape))) for name, x in state.items()}
        return with_seeds(copies, "/".join(map(str, key)))

    def in_format(self, x: Any, format: str | None = None) -> Any:
        """The parameter `x` in a storage format, by default its recipe's; scales are powers of two, one for
        each layer and expert."""
        format = format or self.recipe.weight
        if is_scaled(x) or format == "FP32":
            return x
        if format == "BF16":
            return x.astype(jnp.bfloat16)
        q = quantize(x, formats.get(format), power_of_two=True, blocks=self.blocks(x))
        return q.with_own_dtype(x.dtype)

    def blocks(self, x: Any) -> tuple[int, ...]:
        """The shape of the scales of the parameter `x`: one for each layer and expert."""
        layers = self._order(x)[: x.ndim - self.rank(x)]
        return tuple(dim if axis in layers else 1 for axis, dim in enumerate(x.shape))

    def _order(self, x: Any) -> tuple[int, ...]:
        """The axes of the parameter `x`, the stacked ones first."""
        return (*self.stacked, *(axis for axis in range(x.ndim) if axis not in self.stacked))

    def for_inference(self, x: Any, state: Mapping[str, Any]) -> Any:
        """The parameter `x` in its GEMM's format, with the scales of `state`."""
        order = self._order(x)
        back = tuple(map(order.index, range(x.ndim)))
        q = quantized_kernel(transpose(x, order), self.recipe, dict(state), self.rank(x))
        return transpose(q, back)


class DotState(NamedTuple):
    """The arrays of one dot product beside its operands.

    A plug-in, such as `lora.Adapters`, is a pytree with `depth`, the number of its leading axes of stacked
    layers, and `output`, the function of a `dot_general` that adds to the output; `output_of_groups` is that
    of a `ragged_dot`.
    """

    scaling: dict[str, Any]  # the scaling state
    plugin: Any = None

    def depth(self, kernel: Kernel) -> int:
        """The number of leading axes of stacked layers."""
        of_plugin = self.plugin.depth if self.plugin else 0
        if not self.scaling:
            return of_plugin
        ranks = state_ranks(kernel.recipe)
        found = (self.scaling[name].ndim - rank - bool(kernel.groups) for name, rank in ranks.items())
        return next(found, of_plugin)


class PlannedDot(NamedTuple):
    """A dot product to replace, with its kernel."""

    dot: Dot
    key: tuple[str, ...]  # key of its scaling state
    kernel: Kernel

    @property
    def path(self) -> tuple[str, ...]:
        """The path of its parameter."""
        assert self.dot.path is not None
        return self.dot.path

    def first_state(self) -> dict[str, jax.Array]:
        """The initial scaling state, with a leading axis for each scan that slices the kernel."""
        return self.kernel.first_state(self.key)

    def state_in(self, states: Mapping[str, Any], remedy: str | None = None) -> Any:
        """The scaling state among nested dicts of states; {} if it needs none.

        Args:
            states: the scaling states of a model.
            remedy: for the errors, how to get other states; by default for models with `init`.

        Raises:
            ValueError: `states` lack it, or have one of another recipe, or one that it does not need.
        """
        recipe = self.kernel.recipe
        if not state_names(recipe):
            self._check_no_others(_at(states, self.key), remedy)
            return {}
        # States that `merge` merged by max have the parameter's own key.
        for key in (self.key, self.path):
            found = _at(states, key)
            if found is None:
                continue
            at = f" in the scaling state of {'/'.join(self.path)!r}"
            check_state(recipe, found, "variables", at, remedy or _REMEDY)
            return without_unread(found)
        raise ValueError(
            f"`variables`: expected the scaling state of {'/'.join(self.path)!r} in the collection "
            f"{SCALING!r}; got none. {remedy or _REMEDY_OF_NONE}"
        )

    def _check_no_others(self, found: Any, remedy: str | None) -> None:
        """Raises ValueError for a state of another scaling, if this dot product's casts have none."""
        if others := without_unread(found if isinstance(found, Mapping) else {}):
            raise ValueError(
                f"`variables`: expected nothing in the scaling state of {'/'.join(self.path)!r} for "
                f"{self.kernel.recipe}; got {', '.join(sorted(others))}: the state of another recipe, which "
                f"no step would renew. {remedy or _REMEDY_OF_OTHERS}"
            )


def _at(states: Any, key: Iterable[str]) -> Any:
    """The entry of nested dicts at a path; None if there is none."""
    for name in key:
        states = states.get(name) if isinstance(states, Mapping) else None
    return states


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The dot products of a jaxpr to replace, and how.

    Attributes:
        dots: the dot products to replace, by site.
        below: sites of all equations around them, around named dot products, or around calls of transformed
            functions.
        named: layers of the dot products that get a named scope, by site.
        backend: the GEMM backend.
    """

    dots: dict[Site, PlannedDot]
    below: frozenset[Site]
    named: dict[Site, str]
    backend: str

    @classmethod
    def of(
        cls,
        dots: Iterable[PlannedDot],
        named: Iterable[Dot] = (),
        programs: Iterable[Site] = (),
        backend: str = "auto",
    ) -> "Plan":
        """Makes a plan; `programs` are sites of calls of transformed functions, with plans of their own."""
        by_site = {each.dot.place.site: each for each in dots}
        names = {dot.place.site: dot.layer for dot in named if dot.path is not None}
        below = {site[:n] for site in (*by_site, *programs, *names) for n in range(1, len(site))}
        return cls(by_site, frozenset(below), names, backend)

    def kernels(self) -> dict[tuple[str, ...], PlannedDot]:
        """The kernels by path, each with its dot product inside the most scans, which decides the number of
        scales."""
        return kernels_of(self.dots.values())


def kernels_of(dots: Iterable[PlannedDot]) -> dict[tuple[str, ...], PlannedDot]:
    """See `Plan.kernels`."""
    kernels: dict[tuple[str, ...], PlannedDot] = {}
    for each in dots:
        if each.path not in kernels or len(kernels[each.path].dot.loops) < len(each.dot.loops):
            kernels[each.path] = each
    return kernels
