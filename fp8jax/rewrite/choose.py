"""Which dot products of a function a recipe is for, and the report of it."""

import dataclasses

from fp8jax.recipe import Recipe
from fp8jax.rewrite.plan import Chosen, Dot, Found
from fp8jax.rewrite.report import Report, Row
from fp8jax.rewrite.rules import Choice, Layer, Rules

# Names of a layer's own weight: the layer has the name before it.
WEIGHTS = ("kernel", "embedding", "weight", "w")

# A dot product with fewer inputs or outputs saves nothing, and is a router, a gate or a head.
SMALLEST = 32


def layer_path(path: tuple[str, ...]) -> str:
    """The path of the layer that a parameter belongs to."""
    is_named = len(path) > 1 and path[-1] in WEIGHTS
    return "/".join(path[:-1] if is_named else path)


def choose(found: Found, rules: Rules) -> tuple[list[Chosen], list[tuple[Dot, Choice]]]:
    """The dot products that run in FP8, and what each of them does that takes a parameter."""
    chosen, choices, uses = [], [], {}
    for dot in found.dots:
        if dot.path is None:
            continue
        choice = _choose(dot, found, rules)
        choices.append((dot, choice))
        if choice.reason is None or is_wide(choice):
            number = uses[dot.path] = uses.get(dot.path, -1) + 1
            *parents, name = dot.path
            key = dot.path if not number else (*parents, f"{name}#{number}")
            chosen.append(Chosen(dot, key, choice.recipe))
    return chosen, choices


def is_wide(choice: Choice) -> bool:
    """Whether the recipe itself asks for a GEMM in a wider format."""
    return choice.recipe.gemm != "FP8"


def _choose(dot: Dot, found: Found, rules: Rules) -> Choice:
    assert dot.path is not None
    layer = Layer(layer_path(dot.path), None, dot.shape)
    choice, is_asked = rules.choose(layer), rules.has_rule(layer)
    if dot.reason is not None:
        return Choice(dataclasses.replace(rules.recipe, gemm="FP8"), dot.reason)
    if choice.reason is None and not is_asked:
        if dot.path in found.tables:
            return Choice(choice.recipe, "embeddings stay as they are")
        _, *sides = dot.gemm
        if min(sides) < SMALLEST:
            return Choice(choice.recipe, f"its kernel has fewer than {SMALLEST} rows or columns")
    if dot.is_computed or dot.path in found.tables:
        # The parameter itself is read by something else, too.
        wide = {"weight": "FP32", "weight_grad": "FP32", "master_weight": "-"}
        return Choice(dataclasses.replace(choice.recipe, **wide), choice.reason)
    return choice


def report(recipe: Recipe, found: Found, choices: list[tuple[Dot, Choice]], note: str = "") -> Report:
    """A row for each parameter that a dot product or a convolution takes."""
    rows: dict[tuple[str, bool, str], Row] = {}
    for dot, choice in choices:
        assert dot.path is not None
        key = ("/".join(dot.path), choice.reason is None, choice.reason or "")
        row = rows.get(key) or Row(layer_path(dot.path), _kind(dot), dot.shape, key[1], key[2], gemm=dot.gemm)
        rows[key] = row._replace(flops=row.flops + dot.flops)
    total = sum(dot.flops for dot in found.dots)
    for scope, (path, flops) in found.convolutions.items():
        name = scope if path is None else layer_path(path)
        rows[scope, False, ""] = Row(name, "conv", (), False, "convolutions stay as they are", flops)
        total += flops
    return Report(str(recipe), tuple(rows.values()), total, note)


def _kind(dot: Dot) -> str:
    return "ragged_dot" if dot.groups else "dot_general"
