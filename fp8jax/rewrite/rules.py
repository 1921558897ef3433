"""Which layers a recipe is for: its own patterns, and a user's rules."""

import dataclasses
import fnmatch
import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fp8jax.recipe import DEFAULT_EXCLUDE, Recipe, parse_changes

# Names of a layer's own weight: the layer has the name before it.
WEIGHTS = ("kernel", "embedding", "weight", "w")


def layer_names(path: tuple[str, ...]) -> tuple[str, ...]:
    """The names on the path of the layer that a parameter belongs to."""
    return path[:-1] if len(path) > 1 and path[-1] in WEIGHTS else path


def layer_path(path: tuple[str, ...]) -> str:
    """The path of the layer that a parameter belongs to."""
    return "/".join(layer_names(path))


class Layer(NamedTuple):
    """What a rule may look at."""

    path: str  # as in "params", joined by "/"
    module: Any  # the layer itself
    kernel_shape: tuple[int, ...]  # within one layer of a scan

    @classmethod
    def of(cls, path: tuple[str, ...], module: Any, shape: tuple[int, ...]) -> "Layer":
        """The layer that a parameter belongs to."""
        return cls(layer_path(path), module, shape)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What some layers do instead of what the recipe says; the first rule that fits a layer decides.

        Rule("blocks/0/*", "gemm=BF16")                # as the recipe, in bf16
        Rule("re:.*/(query|key)", "margin=1")
        Rule("lm_head", "O2")                           # in FP8, which heads are not by default
        Rule(smaller_than=128 * 128, recipe="gemm=BF16")
        Rule(kind=nnx.LoRALinear, recipe="bf16")
        Rule(where=lambda layer: layer.kernel_shape[-1] % 16 != 0, recipe="gemm=BF16")

    Attributes:
        path: shell-style pattern, one without "/" for the last name; or a regular expression
            for the whole path after "re:".
        recipe: a recipe, or its text; text without a preset's name changes the model's own.
            Columns that belong to the whole model (comm, moments, master_weight) cannot change.
        kind: a class of layers, or the name of one.
        smaller_than: only kernels of fewer numbers than this.
        where: only layers for which this is true, see `Layer`.

    Raises:
        TypeError: an attribute is of another type.
        ValueError: `path` is no regular expression.
    """

    path: str = "*"
    recipe: Recipe | str = "gemm=BF16"
    kind: Any = None
    smaller_than: int | None = None
    where: Callable[[Layer], bool] | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.smaller_than, numbers.Real) and not isinstance(self.smaller_than, bool)
        for name, fits, expected in (
            ("path", isinstance(self.path, str), "a pattern"),
            (
                "kind",
                self.kind is None or isinstance(self.kind, str | type),
                "a class, the name of one or None",
            ),
            ("smaller_than", self.smaller_than is None or is_number, "a number or None"),
            ("where", self.where is None or callable(self.where), "a function of a Layer or None"),
        ):
            if not fits:
                raise TypeError(f"Rule: `{name}` is {expected}; got {getattr(self, name)!r}.")
        try:
            matches(self.path, "")
        except re.error as error:
            raise ValueError(f"Rule: `path` is no regular expression ({error}): {self.path!r}.") from None

    def fits(self, layer: Layer) -> bool:
        """Whether this rule is about the layer."""
        names = {cls.__name__ for cls in type(layer.module).__mro__}
        if isinstance(self.kind, str) and self.kind not in names:
            return False
        if isinstance(self.kind, type) and not isinstance(layer.module, self.kind):
            return False
        if self.smaller_than is not None and math.prod(layer.kernel_shape) >= self.smaller_than:
            return False
        return matches(self.path, layer.path) and (self.where is None or bool(self.where(layer)))


class Choice(NamedTuple):
    """The recipe of one layer, and why it is not in FP8, or None."""

    recipe: Recipe
    reason: str | None


class Rules:
    """A model's recipe and the rules beside it.

    Raises:
        ValueError: a rule's recipe changes a column of the whole model.
        TypeError: not all are `Rule`s.
    """

    def __init__(self, recipe: Recipe, rules: Iterable[Rule] = ()):
        self.recipe, self.rules = recipe, tuple(rules)
        self.fitted: set[int] = set()
        self.recipes = [_recipe_of(rule, recipe) for rule in self.rules]

    def choose(self, layer: Layer) -> Choice:
        """What the layer does."""
        for number, rule in enumerate(self.rules):
            if rule.fits(layer):
                self.fitted.add(number)
                recipe = self.recipes[number]
                return Choice(recipe, None if recipe.gemm == "FP8" else f"rule: gemm={recipe.gemm}")
        if self.recipe.gemm != "FP8":
            return Choice(self.recipe, f"gemm={self.recipe.gemm}")
        return Choice(self.recipe, _why_not_chosen(self.recipe, layer.path))

    def names(self, layer: Layer) -> bool:
        """Whether a rule, or a pattern of the recipe's other than "*", asks for the layer."""
        patterns = (pattern for pattern in self.recipe.include if pattern != "*")
        return any(rule.fits(layer) for rule in self.rules) or any(matches(p, layer.path) for p in patterns)

    def check(self, paths: Sequence[str]) -> None:
        """Raises ValueError if a rule, or a pattern of the recipe's that the user gave, fits no layer."""
        given = [("include pattern", p) for p in self.recipe.include if p != "*"]
        if self.recipe.exclude != DEFAULT_EXCLUDE:
            given += [("exclude pattern", p) for p in self.recipe.exclude]
        unfit = [
            (name, repr(pattern))
            for name, pattern in given
            if self.recipe.gemm == "FP8" and not any(matches(pattern, path) for path in paths)
        ]
        unfit += [("rule", str(rule)) for i, rule in enumerate(self.rules) if i not in self.fitted]
        for name, what in unfit:
            raise ValueError(
                f"recipe: the {name} {what} matches no layer; the layers are {', '.join(paths) or 'none'}."
            )


def _recipe_of(rule: Any, recipe: Recipe) -> Recipe:
    if not isinstance(rule, Rule):
        raise TypeError(f"`rules`: expected fp8jax.Rule; got {type(rule).__name__}.")
    if isinstance(rule.recipe, str) and "=" in rule.recipe.partition(",")[0]:
        changes = parse_changes(rule.recipe)
        if changes.get("gemm", "FP8") != "FP8":
            changes = {"weight": "FP32", "weight_grad": "FP32", "master_weight": "-", **changes}
        new = dataclasses.replace(recipe, **changes)
    else:
        new = dataclasses.replace(Recipe.parse(rule.recipe), comm=recipe.comm, moments=recipe.moments)
    for name in ("comm", "moments"):
        if getattr(new, name) != getattr(recipe, name):
            raise ValueError(f"`rules`: {name} is a column of the whole model; {rule} changes it.")
    if new.weight == "E4M3" and new.master_weight != recipe.master_weight:
        raise ValueError(f"`rules`: master_weight is a column of the whole model; {rule} changes it.")
    return new


def matches(pattern: str, path: str) -> bool:
    """Shell-style: a pattern with "/" against the path, one without against the last name; after "re:" a
    regular expression against the whole path."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), path) is not None
    return fnmatch.fnmatchcase(path if "/" in pattern else path.rsplit("/", 1)[-1], pattern)


def _why_not_chosen(recipe: Recipe, path: str) -> str | None:
    """None if the recipe's patterns choose the layer, else the rule that does not."""
    if not any(matches(pattern, path) for pattern in recipe.include):
        return f"not in include={'+'.join(recipe.include)}"
    for pattern in recipe.exclude:
        if matches(pattern, path):
            return f"exclude={pattern}"
    return None
