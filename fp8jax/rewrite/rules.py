"""Which layers get which recipe, by the patterns of the model's recipe and by a user's rules."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fp8jax.recipe import DEFAULT_EXCLUDE, Recipe, parse_changes
from fp8jax.rewrite.patterns import Layer, layer_matches, matches, pattern_of, transformer_blocks

# How the reasons begin of layers that rules and patterns leave in high precision, and of embeddings.
BY_RULE, EXCLUDED, NOT_INCLUDED = "rule: ", "exclude=", "not in include="
OF_EMBEDDINGS = "embeddings stay as they are"

_BLOCKS = "a number of blocks, a share of them between 0 and 1, or None"
_OF_MODEL = ("include", "exclude", "comm", "moments", "rounding")  # columns that a rule cannot change
_PARSED = ("path", "kind", "smaller_than", "first", "last")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recipe for some layers, in place of the model's; the first rule that matches a layer applies.

        Rule("blocks/0/*", "gemm=BF16")                # as the recipe, in bf16
        Rule("re:.*/(query|key)", "margin=1")
        Rule("lm_head", "O2")                           # in FP8, which heads are not by default
        Rule(first=1, last=0.25)                        # the first block and the last quarter, in bf16
        Rule(smaller_than=128 * 128, recipe="gemm=BF16")
        Rule(kind=nnx.LoRALinear, recipe="bf16")
        Rule(where=lambda layer: layer.kernel_shape[-1] % 16 != 0, recipe="gemm=BF16")

    Attributes:
        path: shell-style pattern. A pattern without "/" matches the last name, "re:" a regular expression for
            the whole path.
        recipe: a recipe, or its text. Text without a preset's name changes columns of the model's recipe.
            Columns of the whole model (comm, moments, master_weight, rounding) and patterns (include,
            exclude) cannot change: a preset's own do not count, and a change of them is an error.
        kind: only layers of this class, or class name.
        smaller_than: only kernels with fewer entries.
        where: only layers with `where(layer)` true, see `Layer`.
        first, last: only layers in the first or the last blocks: so many, or a share of them between 0 and
            1, rounded up. With both, the layers in either. See `transformer_blocks`.

    Raises:
        TypeError: an attribute has another type.
        ValueError: `path` is not a valid regular expression, or a number is out of its range.
    """

    path: str = "*"
    recipe: Recipe | str = "gemm=BF16"
    kind: Any = None
    smaller_than: int | None = None
    where: Callable[[Layer], bool] | None = None
    first: int | float | None = None
    last: int | float | None = None

    def __post_init__(self) -> None:
        kind, size = self.kind, self.smaller_than
        for name, fits, expected in (
            ("path", isinstance(self.path, str), "a pattern"),
            ("kind", kind is None or isinstance(kind, str | type), "a class, the name of one or None"),
            ("smaller_than", size is None or _is_number(size), "a number or None"),
            ("where", self.where is None or callable(self.where), "a function of a Layer or None"),
            ("first", self.first is None or _is_number(self.first), _BLOCKS),
            ("last", self.last is None or _is_number(self.last), _BLOCKS),
        ):
            if not fits:
                raise TypeError(f"Rule: `{name}` is {expected}; got {getattr(self, name)!r}.")
        try:
            matches(self.path, "")
        except re.error as error:
            raise ValueError(f"Rule: `path` is no regular expression ({error}): {self.path!r}.") from None
        for name in ("first", "last"):
            number: Any = getattr(self, name)
            is_share = not isinstance(number, numbers.Integral)
            if number is not None and not 0 < number < (1 if is_share else math.inf):
                raise ValueError(f"Rule: `{name}` is {_BLOCKS}; got {number!r}.")

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """The rule of a text: a path, or `field=value,field=value`; then, after ":", a recipe.

        A ":" of a regular expression is no such ":", unless a recipe follows.

        "last=0.25", "first=1,last=2:gemm=BF16", "lm_head:O2", "kind=Dense,smaller_than=4096:margin=1"

        Raises:
            ValueError: an unknown field, or a value that is not legal.
        """
        start = re.match(r"(?:(?:[^:]*,)?path=)?re:|", text)[0]  # pyright: ignore[reportOptionalSubscript]
        which, colon, recipe = text.removeprefix(start).rpartition(":")
        if not colon or (start and not _is_recipe(recipe)):
            which, recipe = text.removeprefix(start), cls.recipe
        which = start + which
        if "=" not in which or which.startswith("re:"):
            return cls(which, recipe)
        fields: dict[str, Any] = {}
        for part in which.split(","):
            name, _, value = part.partition("=")
            is_number = re.fullmatch(r"[\d.]*\d", value) is not None
            if name not in _PARSED or name in fields or not (is_number or name in _PARSED[:2]):
                raise ValueError(
                    f"rule: expected a path, or field=value with a field of {', '.join(_PARSED)}; then `:` "
                    f"and a recipe, as in last=0.25:gemm=BF16; got {text!r}."
                )
            fields[name] = value if name in _PARSED[:2] else int(value) if value.isdigit() else float(value)
        return cls(recipe=recipe, **fields)

    def options(self) -> dict[str, Any]:
        """The attributes that are not the defaults, by name."""
        given = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: x for name, (x, default) in given.items() if x != default}

    def __repr__(self) -> str:
        given = self.options().items()
        return f"Rule({', '.join(repr(x) if name == 'path' else f'{name}={x!r}' for name, x in given)})"

    @property
    def counts_blocks(self) -> bool:
        """True for a rule with `first` or `last`."""
        return self.first is not None or self.last is not None

    def fits(self, layer: Layer) -> bool:
        """Whether this rule matches the layer, which may be in any block."""
        names = {cls.__name__ for cls in type(layer.module).__mro__}
        if isinstance(self.kind, str) and self.kind not in names:
            return False
        if isinstance(self.kind, type) and not isinstance(layer.module, self.kind):
            return False
        if self.smaller_than is not None and math.prod(layer.kernel_shape) >= self.smaller_than:
            return False
        return layer_matches(self.path, layer) and (self.where is None or bool(self.where(layer)))


class UsedRule(NamedTuple):
    """A rule of a model, without Python objects, and the layers that it was chosen for."""

    rule: Rule
    layers: tuple[str, ...]

    @classmethod
    def of(cls, rule: Rule, layers: Iterable[str]) -> "UsedRule":
        """The rule of these layers; a rule with a class or a function becomes one with their paths."""
        layers, recipe = tuple(layers), str(rule.recipe)
        if rule.where is None and not isinstance(rule.kind, type):
            return cls(dataclasses.replace(rule, recipe=recipe), layers)
        return cls(Rule(pattern_of(*layers), recipe), layers)


class LayerChoice(NamedTuple):
    """The recipe of one layer."""

    recipe: Recipe
    reason: str | None  # why it does not run in FP8; None if it does
    plain: str = ""  # why its weight and gradient stay FP32 under a recipe with other formats

    @property
    def is_high_precision(self) -> bool:
        """Whether the recipe's GEMM is not FP8."""
        return not self.recipe.is_quantized


class Rules:
    """A model's recipe and its rules.

    Args:
        recipe: the model's recipe.
        rules: the first rule that matches a layer applies.
        plain_weights: whether kernels and their gradients stay float32, because another part stores them.
        paths: the paths of all layers, for rules that count blocks.

    Raises:
        ValueError: a rule's recipe changes a column of the whole model.
        TypeError: a rule is not a `Rule`.
    """

    def __init__(
        self,
        recipe: Recipe,
        rules: Iterable[Rule] = (),
        plain_weights: bool = False,
        paths: Iterable[str] = (),
    ):
        self.recipe, self.rules, self.paths = recipe, tuple(rules), tuple(dict.fromkeys(paths))
        self.recipes = [_recipe_of(rule, recipe) for rule in self.rules]
        self._used: dict[int, dict[str, None]] = {}  # the layers that a rule was chosen for, by its index
        self._blocks: dict[int, tuple[str, ...]] = {}  # by rule
        if plain_weights:
            self.recipe = recipe.with_plain_weights()
            self.recipes = [each.with_plain_weights() for each in self.recipes]

    def choose(self, layer: Layer) -> LayerChoice:
        """The layer's recipe, by the first rule that matches or the recipe's patterns."""
        if (number := self._first(layer)) < len(self.rules):
            self._used.setdefault(number, {})[layer.path] = None
            recipe = self.recipes[number]
            return LayerChoice(recipe, None if recipe.is_quantized else f"{BY_RULE}gemm={recipe.gemm}")
        if not self.recipe.is_quantized:
            return LayerChoice(self.recipe, f"gemm={self.recipe.gemm}")
        return LayerChoice(self.recipe, self._exclusion(layer))

    @property
    def used(self) -> tuple[UsedRule, ...]:
        """The rules that were chosen for layers, in order."""
        return tuple(UsedRule.of(self.rules[number], self._used[number]) for number in sorted(self._used))

    def leaves_out(self, layer: Layer) -> bool:
        """Whether the recipe's patterns leave the layer out, and no rule names it, whatever the GEMMs are."""
        return not self.names(layer) and self._exclusion(layer) is not None

    def _exclusion(self, layer: Layer) -> str | None:
        if not any(layer_matches(pattern, layer) for pattern in self.recipe.include):
            return f"{NOT_INCLUDED}{'+'.join(self.recipe.include)}"
        excluding = (pattern for pattern in self.recipe.exclude if layer_matches(pattern, layer))
        return next((f"{EXCLUDED}{pattern}" for pattern in excluding), None)

    def names(self, layer: Layer) -> bool:
        """Whether a rule, or an include pattern other than "*", matches the layer."""
        if self._first(layer) < len(self.rules):
            return True
        return any(layer_matches(pattern, layer) for pattern in self.recipe.include if pattern != "*")

    def _first(self, layer: Layer) -> int:
        """The index of the first rule that matches the layer; the number of rules if none does."""
        count = len(self.rules)
        return next((number for number in range(count) if self._fits(number, layer)), count)

    def _fits(self, number: int, layer: Layer) -> bool:
        rule = self.rules[number]
        if not rule.fits(layer) or not rule.counts_blocks:
            return rule.fits(layer)
        if number not in self._blocks:
            paths = [path for path in self.paths if matches(rule.path, path)]
            try:
                self._blocks[number] = transformer_blocks([] if layer.scans else paths, rule.first, rule.last)
            except ValueError as error:
                raise ValueError(f"`rules`: {rule} {error}; the layers are {', '.join(paths)}.") from None
        return f"{layer.path}/".startswith(self._blocks[number])

    def check(self, layers: Sequence[Layer]) -> None:
        """Raises ValueError if a rule or a user's include or exclude pattern matches no layer, or an earlier
        rule matches all layers of a rule."""
        given = [("include pattern", p) for p in self.recipe.include if p != "*"]
        exclude = self.recipe.exclude  # beside other patterns, those of the default may match nothing
        given += [("exclude pattern", p) for p in exclude if p not in DEFAULT_EXCLUDE or len(exclude) == 1]
        unfit = [
            (name, repr(pattern))
            for name, pattern in given
            if self.recipe.is_quantized and not any(layer_matches(pattern, layer) for layer in layers)
        ]
        for number in [i for i in range(len(self.rules)) if i not in self._used]:
            rule = self.rules[number]
            for layer in [layer for layer in layers if self._fits(number, layer)]:
                if (first := self._first(layer)) != number:
                    raise ValueError(
                        f"`rules`: {rule} comes after {self.rules[first]}, which already matches "
                        f"{layer.path}: put it first."
                    )
            unfit.append(("rule", str(rule)))
        paths = dict.fromkeys(layer.path for layer in layers)
        for name, what in unfit:
            raise ValueError(
                f"recipe: the {name} {what} matches no layer; the layers are {', '.join(paths) or 'none'}."
            )


def _recipe_of(rule: Any, recipe: Recipe) -> Recipe:
    if not isinstance(rule, Rule):
        raise TypeError(f"`rules`: expected fp8jax.Rule; got {type(rule).__name__}.")
    name, comma, rest = str(rule.recipe).partition(",")
    preset = None if "=" in name else Recipe.parse(name)
    text = str(rule.recipe) if preset is None else rest
    changes = parse_changes(text) if preset is None or comma else {}
    rounding = recipe.with_plain_weights().rounding  # legal with any format of the weights
    for column in _OF_MODEL:
        if changes.pop(column, rounding) not in (getattr(recipe, column), rounding):
            is_pattern = column in ("include", "exclude")
            why = (
                "a rule's layers are its `path`" if is_pattern else f"{column} is a column of the whole model"
            )
            raise ValueError(f"`rules`: {why}; {rule} changes {column if is_pattern else 'it'}.")
    of_model = {column: getattr(recipe, column) for column in _OF_MODEL} | {"rounding": rounding}
    if preset is None and changes.get("gemm", "FP8") not in ("FP8", "FP4"):
        changes = {"weight": "FP32", "weight_grad": "FP32", "master_weight": "-", **changes}
    new = dataclasses.replace(preset or recipe, **of_model, **changes)
    if "FP16" in (new.weight, new.master_weight):
        new = dataclasses.replace(new, rounding=recipe.rounding)
    if new.weight == "E4M3" and new.master_weight != recipe.master_weight:
        raise ValueError(f"`rules`: master_weight is a column of the whole model; {rule} changes it.")
    return new


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _is_recipe(text: str) -> bool:
    """Whether a text is a recipe, or changes of one."""
    try:
        parse_changes(text) if "=" in text.partition(",")[0] else Recipe.parse(text)
    except ValueError:
        return False
    return True
