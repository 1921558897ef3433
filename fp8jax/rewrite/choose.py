"""The choice of a function's dot products that run in FP8, and its report."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.dot import init_ragged_state, init_state
from fp8jax.recipe import Recipe
from fp8jax.rewrite.dots import OF_CONSTANTS, Dot
from fp8jax.rewrite.plan import Chosen, Found
from fp8jax.rewrite.report import Report, Row
from fp8jax.rewrite.rules import Choice, Layer, Rules, layer_path

_NO_STATE = "`transform` knew no parameter of it"

# Smaller dot products gain no speed, and are usually routers, gates or heads.
SMALLEST = 32


class Kernel(NamedTuple):
    """A kernel of a model with scaling states from `init`, before its dot products are traced."""

    recipe: Recipe
    rank: int  # rank of the array that one scale covers
    groups: int  # number of experts; 0 without experts

    @property
    def parts(self) -> list[str]:
        """The names of the arrays of its scaling state."""
        return list(init_state(self.recipe)) if self.recipe.gemm == "FP8" else []

    def first_state(self, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """The initial scaling state; `shape` may have leading axes of stacked layers."""
        if self.recipe.gemm != "FP8":
            return {}
        state = init_ragged_state(self.recipe, self.groups) if self.groups else init_state(self.recipe)
        stack = shape[: len(shape) - self.rank - bool(self.groups)]
        return {name: jnp.broadcast_to(x, (*stack, *x.shape)) for name, x in state.items()}

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the kernel's scale."""
        return (*shape[: len(shape) - self.rank], *(1,) * self.rank)


def choose(
    found: Found,
    rules: Rules,
    modules: Mapping[str, Any],
    kernels: Mapping[tuple[str, ...], Kernel] | None = None,
) -> tuple[list[Chosen], list[tuple[Dot, Choice]]]:
    """The dot products that `evaluate` replaces, and the choice for every dot product of a parameter.

    Args:
        found: the dot products of the function.
        rules: the model's rules.
        modules: the function's modules by path.
        kernels: the parameters with scaling states, if already initialized; others stay high precision.
    """
    chosen, choices, uses = [], [], {}
    for dot in found.dots:
        if dot.path is None:
            continue
        choice = _choose(dot, found, rules, modules)
        if kernels is not None and choice.reason is None:
            kernel = kernels.get(dot.path)
            choice = Choice(*((choice.recipe, _NO_STATE) if kernel is None else (kernel.recipe, None)))
        choices.append((dot, choice))
        if choice.reason is None or is_wide(choice):
            number = uses[dot.path] = uses.get(dot.path, -1) + 1
            name = "".join(dot.path[-1:])
            key = dot.path if not number else (*dot.path[:-1], f"{name}#{number}")
            chosen.append(Chosen(dot, key, choice.recipe))
    return chosen, choices


def is_wide(choice: Choice) -> bool:
    """Whether the layer's recipe has a high-precision GEMM."""
    return choice.recipe.gemm != "FP8"


def _choose(dot: Dot, found: Found, rules: Rules, modules: Mapping[str, Any]) -> Choice:
    assert dot.path is not None
    layer = Layer.of(dot.path, module_of(dot.path, modules), dot.shape)
    choice = rules.choose(layer)
    if dot.reason is not None:
        return Choice(dataclasses.replace(rules.recipe, gemm="FP8"), dot.reason)
    if choice.reason is None and not rules.names(layer):
        if dot.path in found.tables or dot.path[-1:] == ("embedding",):
            return Choice(choice.recipe, "embeddings stay as they are, unless a rule names them")
        _, *sides = dot.gemm
        if min(sides) < SMALLEST:
            return Choice(choice.recipe, f"its kernel has fewer than {SMALLEST} rows or columns")
    if dot.is_computed or dot.path in found.tables:
        # Other operations read the parameter, too.
        return Choice(choice.recipe.with_plain_weights(), choice.reason)
    return choice


def module_of(path: tuple[str, ...], modules: Mapping[str, Any]) -> Any:
    """The module of a parameter, or None."""
    return modules.get("/".join(path[:-1]))


def report(
    recipe: Recipe,
    found: Found,
    choices: list[tuple[Dot, Choice]],
    modules: Mapping[str, Any],
    note: str = "",
) -> Report:
    """The report, with a row for each parameter of a dot product, gather or convolution."""
    rows: dict[tuple[str, bool, str], Row] = {}
    for path in sorted(found.tables - {dot.path for dot, _ in choices}):
        rows["/".join(path), False, ""] = Row(
            layer_path(path), _kind(path, modules) or "gather", (), False, "embeddings stay as they are"
        )
    for dot, choice in choices:
        assert dot.path is not None
        key = ("/".join(dot.path), choice.reason is None, choice.reason or "")
        kind = _kind(dot.path, modules) or ("ragged_dot" if dot.groups else "dot_general")
        row = rows.get(key) or Row(layer_path(dot.path), kind, dot.shape, key[1], key[2], gemm=dot.gemm)
        rows[key] = row._replace(flops=row.flops + dot.flops)
    total = sum(dot.flops for dot in found.dots)
    for (scope, path), flops in found.convolutions.items():
        name = scope if path is None else layer_path(path)
        kind = _kind(path, modules) if path is not None else ""
        row = Row(name, kind or "conv", (), False, "convolutions stay as they are", flops)
        rows[f"{scope} {name}", False, ""] = row
        total += flops
    if constant := sum(dot.flops for dot in found.dots if dot.reason == OF_CONSTANTS):
        rows["", False, ""] = Row("(constants)", "dot_general", (), False, OF_CONSTANTS, constant)
    return Report(str(recipe), tuple(rows.values()), total, note)


def _kind(path: tuple[str, ...], modules: Mapping[str, Any]) -> str:
    module = module_of(path, modules)
    return "" if module is None else type(module).__name__
