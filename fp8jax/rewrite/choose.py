"""The choice of the dot products that run in FP8, with their kernels and the keys of their states."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.dot import state_names
from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.dots import Dot
from fp8jax.rewrite.interpreter.find import FoundDots
from fp8jax.rewrite.patterns import Layer
from fp8jax.rewrite.plan import Kernel, PlannedDot, kernels_of
from fp8jax.rewrite.rules import OF_EMBEDDINGS, LayerChoice, Rules
from fp8jax.scaling.base import KEY

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
                _check_axes(dot, kernels[dot.path])
                choice = _with_formats_of(
                    kernels[dot.path].recipe, choice, dot, "`transform` got no `inputs`"
                )
            else:
                choice = choice._replace(reason="`transform` knew no parameter of it")
        choices.append((dot, choice))
        if choice.reason is None or choice.is_high_precision:
            layers = tuple(length for _, length in dot.loops)
            chosen.append((dot, Kernel(choice.recipe, layers, dot.groups, dot.axes, dot.gemm[1:])))
    keys = _keys([dot for dot, _ in chosen])
    planned = [PlannedDot(dot, key, kernel) for key, (dot, kernel) in zip(keys, chosen, strict=True)]
    # One of the dot products of a parameter decides how it is stored.
    deciding = {each.dot.place.site for each in kernels_of(planned).values()}
    plain = {dot.path: choice.plain for dot, choice in choices if dot.place.site in deciding}
    return planned, [(dot, choice._replace(plain=plain.get(dot.path, ""))) for dot, choice in choices]


def _check_axes(dot: Dot, kernel: Kernel) -> None:
    """Raises ValueError if a scan does not slice the axes of a kernel's layers."""
    expected = kernel.stacked[: len(dot.axes)]
    if expected and dot.axes != expected:
        raise ValueError(
            f"`model`: expected a scan along axis {expected[0]} of the kernel of {dot.layer!r}, which "
            f"`transform` took for the axis of stacked layers; got a scan along axis {dot.axes[0]}. Give "
            "`transform` example inputs, `inputs=(x,)`."
        )


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
    reason = dot.reason
    if not reason and dot.place.is_on_each and KEY in state_names(choice.recipe):  # no max of seeds
        reason = "it is inside of a shard_map, and its rounding has seeds: give it a rule, as `current`"
    if reason is not None:
        return LayerChoice(rules.recipe if rules.recipe.is_quantized else Recipe.TE, reason)
    if choice.reason is None and not rules.names(layer):
        if path in found.tables or path[-1:] == ("embedding",):
            return LayerChoice(choice.recipe, f"{OF_EMBEDDINGS}, unless a rule names them")
        _, *sides = dot.gemm
        if min(sides) < SMALLEST:
            return LayerChoice(choice.recipe, f"its kernel has fewer than {SMALLEST} rows or columns")
    why = dot.computed or ("other operations read its table" if path in found.tables else None)
    if why is None and choice.recipe.weight == "FP32" and dot.axes != tuple(range(len(dot.axes))):
        why = "a scan is along another axis than the first"  # the gradient's scales have the weight's blocks
    return choice if why is None else _with_formats_of(choice.recipe.with_plain_weights(), choice, dot, why)


# Names of dtypes in reports.
_DTYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


def _with_formats_of(new: Recipe, choice: LayerChoice, dot: Dot, why: str) -> LayerChoice:
    """The choice with another recipe, and `why` its weight or gradient is not in the recipe's format."""
    columns = (("weight", "weight"), ("gradient", "weight_grad"))
    names = [name for name, column in columns if getattr(new, column) != getattr(choice.recipe, column)]
    if choice.reason is not None or not names:
        return choice._replace(recipe=new)
    dtype = _DTYPES.get(str(dot.dtype), str(dot.dtype))
    stays = "stay" if len(names) > 1 else "stays"
    return LayerChoice(new, None, f"{' and '.join(names)} {stays} {dtype}: {why}")
