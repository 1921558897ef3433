"""The precision chart as a value: for each kind of tensor, the format it is kept in.

| recipe   | gemm | comm | weight | master | weight_grad | moments     |
|----------|------|------|--------|--------|-------------|-------------|
| fp32     | FP32 | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| bf16     | BF16 | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| fp16_amp | FP16 | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| te       | FP8  | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| O1       | FP8  | FP8  | FP16   | -      | FP8 (E4M3)  | FP32 + FP32 |
| O2       | FP8  | FP8  | FP16   | -      | FP8 (E4M3)  | E4M3 + FP16 |
| O3       | FP8  | FP8  | E4M3   | FP16   | FP8 (E4M3)  | E4M3 + FP16 |
| te+O2    | TE's way of scaling in the gemm column, the rest as in O2             |

A `Recipe` is one row; `dataclasses.replace` makes another. It is frozen, hashable and
printed and parsed by inverse functions:

    >>> from fp8jax import Recipe
    >>> str(Recipe.parse("O2,scaling=current"))
    'O2,scaling=current'
    >>> Recipe.te(amax_history_len=16).gemm
    'FP8'
"""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fp8jax import accelerate

# Layers that stay out of FP8 unless asked for: the output head, as TransformerEngine's
# and torchao's users do by hand. A pattern without "/" is matched with the layer's own
# name, one with "/" with its whole path.
DEFAULT_EXCLUDE = ("lm_head", "head", "*_head", "logits*", "classifier", "router")

_LEGAL: dict[str, tuple[Any, ...]] = {
    "gemm": ("FP32", "BF16", "FP16", "FP8"),
    "comm": ("FP32", "BF16", "FP8"),
    "weight": ("FP32", "FP16", "E4M3"),
    "master_weight": ("-", "FP32", "FP16"),
    "weight_grad": ("FP32", "E4M3"),
    "moments": (("FP32", "FP32"), ("E4M3", "FP16")),
    "scaling": ("delayed", "current"),
    "fp8_format": ("HYBRID", "E4M3"),
    "amax_compute_algo": ("max", "most_recent"),
    "first_scale": ("typical", "tensor", "one"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which format each kind of tensor is kept in, and how FP8 scales are chosen.

    Attributes:
        gemm: format of the matched layers' matrix products.
        comm: format of gradients on the wire between devices.
        weight: format of the matched layers' kernels; FP16 and E4M3 carry a scale.
        master_weight: format of the optimizer's own copy of the weights, "-" for none:
            the weight is then its own master.
        weight_grad: format in which the matched kernels' gradients leave the backward.
        moments: formats of Adam's first and second moment.
        scaling: how a GEMM operand's scale is chosen: "delayed" by the amaxes of the
            steps before, "current" by the tensor itself.
        fp8_format: "HYBRID" is E4M3 for inputs and weights, E5M2 for output gradients;
            "E4M3" is E4M3 for all.
        margin: binary headroom: scales are 2**margin larger than amax asks for.
        interval: steps between two updates of a delayed scale.
        amax_history_len: steps in delayed scaling's window.
        amax_compute_algo: "max" of the window, or its "most_recent" entry.
        override_linear_precision: (fprop, dgrad, wgrad), True for each GEMM that runs in
            high precision instead of FP8.
        first_scale: delayed scaling's scale before anything was seen: that of a "typical"
            tensor; from the first "tensor" itself, whose amax then has to be known before it is
            cast, at every step; or "one" as TransformerEngine starts.
        include: layers that take part, as shell-style patterns.
        exclude: layers that do not, although included.

    Raises:
        ValueError: a value that is not legal, or two that contradict each other.
    """

    gemm: str = "FP8"
    comm: str = "FP32"
    weight: str = "FP32"
    master_weight: str = "-"
    weight_grad: str = "FP32"
    moments: tuple[str, str] = ("FP32", "FP32")
    scaling: str = "delayed"
    fp8_format: str = "HYBRID"
    margin: int = 0
    interval: int = 1
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    first_scale: str = "typical"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE

    FP32: ClassVar["Recipe"]
    BF16: ClassVar["Recipe"]
    FP16_AMP: ClassVar["Recipe"]
    TE: ClassVar["Recipe"]
    O1: ClassVar["Recipe"]
    O2: ClassVar["Recipe"]
    O3: ClassVar["Recipe"]
    TE_O2: ClassVar["Recipe"]

    def __post_init__(self) -> None:
        for name, legal in _LEGAL.items():
            if getattr(self, name) not in legal:
                raise _illegal(name, getattr(self, name), " ".join(map(_show, legal)))
        _check_numbers(self)
        _check_patterns(self)
        _check_combination(self)

    @classmethod
    def te(
        cls,
        fp8_format: str = "HYBRID",
        margin: int = 0,
        interval: int = 1,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
        first_scale: str = "typical",
    ) -> "Recipe":
        """TransformerEngine's `DelayedScaling`, argument by argument.

        Args: see the attributes of the same names. `first_scale="one"` reproduces
            TransformerEngine's first steps too.
        """
        return cls(
            fp8_format=fp8_format,
            margin=margin,
            interval=interval,
            amax_history_len=amax_history_len,
            amax_compute_algo=amax_compute_algo,
            override_linear_precision=override_linear_precision,
            first_scale=first_scale,
        )

    @classmethod
    def from_accelerate(
        cls,
        source: "str | os.PathLike[str] | object | None" = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> "Recipe":
        """The recipe that HuggingFace Accelerate's FP8 settings ask for.

        `mixed_precision` no, fp16 and bf16 are `fp32`, `fp16_amp` and `bf16`. In fp8, backend TE is
        `Recipe.te` with the settings of the same names, and MSAMP is `O1` or `O2` by its `opt_level`;
        without a backend it is MSAMP if an `opt_level` is given, else TE. What is not given has
        accelerate's default, e.g. O2, and amax_compute_algo most_recent where `Recipe.te` has max.

        `use_autocast_during_eval` changes nothing in training: both values give the same recipe, and the
        evaluation is the caller's to choose. `model.apply(variables, x)` evaluates in FP8 (True), and
        `module.apply(model.dequantize(variables), x)` without it (False, accelerate's default).

        Args:
            source: an object with accelerate's attributes (`TERecipeKwargs(...)`, `MSAMPRecipeKwargs(...)`,
                `FP8RecipeKwargs(...)`, or one like them), a mapping of such settings or of a whole
                configuration, the path of a `config.yaml`, or None for the environment. Keys may have any
                case, a prefix "fp8_" and the spellings of accelerate's questionnaire.
            environ: where ACCELERATE_MIXED_PRECISION and ACCELERATE_FP8_* are read from; None: `os.environ`.

        Raises:
            ValueError: a key or value that is unknown or contradicts another, or one that no recipe
                expresses: torchao's settings, MXFP8 blocks, the format E5M2.
            TypeError: `source` is nothing of that kind.
            OSError: the file cannot be read.
            ImportError: there is no PyYAML to read it.

        References:
            Accelerate 1.15.0, utils/dataclasses.py and commands/launch.py.
        """
        preset, changes = accelerate.read(source, environ)
        return dataclasses.replace(PRESETS[preset], **changes)

    def with_plain_weights(self) -> "Recipe":
        """The recipe for a parameter that stays as it is, with a gradient of its own dtype."""
        return dataclasses.replace(self, weight="FP32", weight_grad="FP32", master_weight="-")

    @classmethod
    def parse(cls, text: "str | Recipe") -> "Recipe":
        """The recipe that `text` describes: a preset's name, then `,field=value` changes.

        Tuples are written with "+": `moments=E4M3+FP16`, `exclude=lm_head+*/out`, and an
        empty value is the empty tuple. Inverse of `str`.

        Raises:
            ValueError: an unknown preset, field or value; the message lists the legal ones.
        """
        if isinstance(text, Recipe):
            return text
        name, *changes = str(text).split(",", 1)
        if name.strip() not in PRESETS:
            raise ValueError(f"recipe: expected one of {', '.join(PRESETS)}; got {name.strip()!r}.")
        return dataclasses.replace(PRESETS[name.strip()], **(parse_changes(changes[0]) if changes else {}))

    def __str__(self) -> str:
        def changes(preset: Recipe) -> list[str]:
            return [
                f"{f.name}={_show(getattr(self, f.name))}"
                for f in dataclasses.fields(self)
                if getattr(self, f.name) != getattr(preset, f.name)
            ]

        described = [(changes(preset), name) for name, preset in PRESETS.items()]
        difference, name = min(described, key=lambda pair: len(pair[0]))
        return ",".join([name, *difference])

    @property
    def gemm_formats(self) -> tuple[str, str]:
        """Names of the formats of an FP8 GEMM's forward operands and output gradient."""
        return ("E4M3", "E4M3" if self.fp8_format == "E4M3" else "E5M2")


def check_weights(recipe: Recipe, formats: Collection[str]) -> None:
    """Raises ValueError if an optimizer is told of other weights than it gets.

    Without scaled weights any recipe fits: what is left out of FP8 is plain at every level, and narrow
    moments are good for plain models too. Where rules make the weights of several levels, the recipe is of
    one of them, and has masters if any weights need them.

    Args:
        recipe: what the optimizer was told.
        formats: names of the formats of the scaled weights.
    """
    needs_masters = "E4M3" in formats
    if not formats or (recipe.weight in formats and (recipe.master_weight != "-" or not needs_masters)):
        return
    raise ValueError(
        f"`recipe`: expected one with {' and '.join(sorted(formats))} weights, as `params` has them, e.g. "
        f"{'O3' if needs_masters else 'O1 or O2'}; got {recipe}, with {recipe.weight} weights and masters "
        f"{recipe.master_weight}. Give the optimizer the recipe that the model was transformed with, or "
        "none: it reads the weights' formats."
    )


def parse_changes(text: str) -> dict[str, Any]:
    """`field=value,field=value` as a dict of values of the fields' types.

    Raises:
        ValueError: an unknown field, one twice, or a value that cannot be read.
    """
    parsed = [_parse_change(change.strip()) for change in text.split(",")]
    twice = [field for i, (field, _) in enumerate(parsed) if field in dict(parsed[:i])]
    if twice:
        raise ValueError(f"recipe: expected each field once; got {twice[0]} twice in {text!r}.")
    return dict(parsed)


def _show(value: Any) -> str:
    """One value as `parse` reads it."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _illegal(name: str, got: Any, expected: str) -> ValueError:
    return ValueError(f"recipe: `{name}` is one of: {expected}; got {_show(got)!r}.")


def _parse_change(text: str) -> tuple[str, Any]:
    """One `field=value` as the field's name and a value of its type."""
    name, equals, raw = (part.strip() for part in text.partition("="))
    fields = {f.name: f for f in dataclasses.fields(Recipe)}
    if not equals or name not in fields:
        raise ValueError(
            f"recipe: expected field=value after the preset, with a field of "
            f"{', '.join(fields)}; got {text!r}."
        )
    default = fields[name].default
    if isinstance(default, tuple):
        words = tuple(word.strip() for word in raw.split("+")) if raw else ()
        if not isinstance(default[0], bool):
            return name, words
        booleans = {"true": True, "false": False}
        if any(word.lower() not in booleans for word in words):
            raise _illegal(name, raw, "True or False, three of them, as False+False+True")
        return name, tuple(booleans[word.lower()] for word in words)
    if isinstance(default, int):
        try:
            return name, int(raw)
        except ValueError:
            raise _illegal(name, raw, "an integer") from None
    return name, raw


def _check_numbers(recipe: Recipe) -> None:
    for name, least, most in (
        ("margin", 0, 100),
        ("interval", 1, 2**20),
        ("amax_history_len", 1, 2**20),
    ):
        number = getattr(recipe, name)
        if type(number) is not int or not least <= number <= most:
            raise _illegal(name, number, f"an integer from {least} to {most}")
    override = recipe.override_linear_precision
    if not isinstance(override, tuple) or [type(o) for o in override] != [bool] * 3:
        raise _illegal("override_linear_precision", override, "three booleans: fprop dgrad wgrad")


def _check_patterns(recipe: Recipe) -> None:
    for name in ("include", "exclude"):
        patterns = getattr(recipe, name)
        legal = isinstance(patterns, tuple) and all(
            isinstance(p, str) and p and not any(c in ",+=" or c.isspace() for c in p) for p in patterns
        )
        if not legal:
            raise _illegal(name, patterns, "a tuple of patterns without comma, plus, equals, space")
        for pattern in patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(
                    f"recipe: `{name}`: {pattern!r} is no regular expression ({error})."
                ) from None


def _check_combination(recipe: Recipe) -> None:
    """Columns that contradict each other."""
    if (recipe.weight == "E4M3") != (recipe.master_weight != "-"):
        raise ValueError(
            "recipe: a master weight is kept where the weight itself is too coarse to train, so "
            "weight=E4M3 needs master_weight=FP16 or FP32, and any other weight needs "
            f"master_weight=-; got weight={recipe.weight}, master_weight={recipe.master_weight}."
        )
    if recipe.gemm != "FP8" and (recipe.weight != "FP32" or recipe.weight_grad != "FP32"):
        raise ValueError(
            "recipe: weight and weight_grad are those of the layers whose GEMMs are FP8; with "
            f"gemm={recipe.gemm} both must be FP32; got weight={recipe.weight}, "
            f"weight_grad={recipe.weight_grad}."
        )
    if all(recipe.override_linear_precision) and recipe.gemm == "FP8":
        raise ValueError("recipe: override_linear_precision takes all three GEMMs out of FP8; say gemm=BF16.")
    if recipe.gemm == "FP8" and not recipe.include:
        raise ValueError("recipe: include is empty, so no layer is in FP8; say gemm=BF16.")


Recipe.FP32 = Recipe(gemm="FP32")
Recipe.BF16 = Recipe(gemm="BF16")
Recipe.FP16_AMP = Recipe(gemm="FP16")
Recipe.TE = Recipe()
# MS-AMP's linear layers keep a window of 16 amaxes.
Recipe.O1 = Recipe(comm="FP8", weight="FP16", weight_grad="E4M3", amax_history_len=16)
Recipe.O2 = dataclasses.replace(Recipe.O1, moments=("E4M3", "FP16"))
Recipe.O3 = dataclasses.replace(Recipe.O2, weight="E4M3", master_weight="FP16")
Recipe.TE_O2 = dataclasses.replace(Recipe.O2, amax_history_len=Recipe.TE.amax_history_len)

PRESETS: dict[str, Recipe] = {
    "fp32": Recipe.FP32,
    "bf16": Recipe.BF16,
    "fp16_amp": Recipe.FP16_AMP,
    "te": Recipe.TE,
    "O1": Recipe.O1,
    "O2": Recipe.O2,
    "O3": Recipe.O3,
    "te+O2": Recipe.TE_O2,
}
