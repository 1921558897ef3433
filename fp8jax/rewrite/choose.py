"""The choice of the dot products that run in FP8, with their kernels and the keys of their states."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.recipe import Recipe
from fp8jax.rewrite.dots import Dot, Kernel, PlannedDot
from fp8jax.rewrite.find import FoundDots
from fp8jax.rewrite.rules import Layer, LayerChoice, Rules

# Smaller dot products gain no speed, and are usually routers, gates or heads.
SMALLEST = 32


def choose(
    found: FoundDots,
    rules: Rules,
    modules: Mapping[str, Any],
    kernels: Mapping[tuple[str, ...], Kernel] | None = None,
) -> tuple[list[PlannedDot], list[tuple[Dot, LayerChoice]]]:
    """The dot products that `evaluate` replaces, and the choice for every dot product of a parameter.

    Args:
        found: the dot products of the function.
        rules: the model's rules.
        modules: the function's modules by path.
        kernels: the parameters with scaling states, if already initialized; others stay high precision.
    """
    chosen, choices = [], []
    for dot in found.dots:
        if dot.path is None:
            continue
        choice = _choose(dot, dot.path, found, rules, layer_of(dot, modules))
        if kernels is not None and choice.reason is None:
            if dot.path in kernels:
                choice = LayerChoice(kernels[dot.path].recipe, None)
            else:
                choice = choice._replace(reason="`transform` knew no parameter of it")
        choices.append((dot, choice))
        if choice.reason is None or choice.is_high_precision:
            layers = tuple(length for _, length in dot.loops)
            chosen.append((dot, Kernel(choice.recipe, layers, dot.groups)))
    keys = _keys([dot for dot, _ in chosen])
    return [PlannedDot(dot, key, kernel) for key, (dot, kernel) in zip(keys, chosen, strict=True)], choices


def _keys(dots: Sequence[Dot]) -> list[tuple[str, ...]]:
    """The keys of the dot products' scaling states: the parameter's path, then path#1 and so on.

    The state at the parameter's path has the scale of its gradient, so it belongs to the first dot product
    that is not frozen.
    """
    own: dict[Any, int] = {}  # by path
    for number, dot in enumerate(dots):
        if dot.path not in own or dots[own[dot.path]].is_frozen and not dot.is_frozen:
            own[dot.path] = number
    keys, others = [], collections.Counter[Any]()
    for number, dot in enumerate(dots):
        path: Any = dot.path
        if own[path] == number:
            keys.append(path)
            continue
        others[path] += 1
        name = "".join(path[-1:])  # a function of one array has the path ()
        keys.append((*path[:-1], f"{name}#{others[path]}"))
    return keys


def layer_of(dot: Dot, modules: Mapping[str, Any]) -> Layer:
    """The layer of a parameter's dot product; `modules` are the function's modules by path."""
    scans, path = tuple(length for _, length in dot.loops), dot.path or ()
    return Layer(dot.layer, modules.get("/".join(path[:-1])), dot.shape, scans, "/".join(path))


def _choose(dot: Dot, path: tuple[str, ...], found: FoundDots, rules: Rules, layer: Layer) -> LayerChoice:
    choice = rules.choose(layer)
    if dot.reason is not None:
        return LayerChoice(rules.recipe if rules.recipe.is_quantized else Recipe.TE, dot.reason)
    if choice.reason is None and not rules.names(layer):
        if path in found.tables or path[-1:] == ("embedding",):
            return LayerChoice(choice.recipe, "embeddings stay as they are, unless a rule names them")
        _, *sides = dot.gemm
        if min(sides) < SMALLEST:
            return LayerChoice(choice.recipe, f"its kernel has fewer than {SMALLEST} rows or columns")
    if dot.is_computed or path in found.tables:
        # Other operations read the parameter, too.
        return LayerChoice(choice.recipe.with_plain_weights(), choice.reason)
    return choice
