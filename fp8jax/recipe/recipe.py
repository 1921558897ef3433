"""The precision chart as a value: for each kind of tensor, the format it is stored in.

| recipe   | gemm | comm | weight | master | weight_grad | moments     |
|----------|------|------|--------|--------|-------------|-------------|
| fp32     | FP32 | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| bf16     | BF16 | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| fp16_amp | FP16 | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| te       | FP8  | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| O1       | FP8  | FP8  | FP16   | -      | FP8 (E4M3)  | FP32 + FP32 |
| O2       | FP8  | FP8  | FP16   | -      | FP8 (E4M3)  | E4M3 + FP16 |
| O3       | FP8  | FP8  | E4M3   | FP16   | FP8 (E4M3)  | E4M3 + FP16 |
| te+O2    | TransformerEngine's scaling in the gemm column, otherwise as O2       |
| fp8      | FP8  | FP8  | FP16   | -      | FP8 (E4M3)  | E5M2 + FP16 |
| current  | te with scaling=current: no scaling state                             |
| block    | FP8  | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| mxfp8    | FP8  | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| nvfp4    | FP4  | FP32 | FP32   | -      | FP32        | FP32 + FP32 |
| block+O2 | block's scaling in the gemm column, otherwise as O2; so for each of the three |
|          | and O1, O2, O3, fp8                                                    |

`current` needs nothing else in a training loop. `fp8` is the one for memory: its `rounding` loses nothing
that O1 to O3, which are MS-AMP's, lose.

A `Recipe` is one row. It is frozen and hashable; `dataclasses.replace` makes another one, and `str` and
`Recipe.parse` are inverse functions:

    >>> from fp8jax import Recipe
    >>> str(Recipe.parse("O2,scaling=current"))
    'O2,scaling=current'
    >>> Recipe.te(amax_history_len=16).gemm
    'FP8'
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fp8jax.recipe import from_accelerate, from_te, legal_values

# Layers that stay in high precision by default: output heads, which users of TransformerEngine and torchao
# exclude by hand, and routers.
DEFAULT_EXCLUDE = ("lm_head", "head", "*_head", "logits*", "classifier", "router")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The format of each kind of tensor, and the scaling method of FP8 GEMMs.

    "The matched layers" are those that `include` and `exclude` choose.

    Attributes:
        gemm: format of the matched layers' GEMMs.
        comm: format in which gradients are sent between devices.
        weight: format of the matched layers' kernels; FP16 and E4M3 have a scale.
        master_weight: format of the optimizer's copy of the weights; "-" for no copy.
        weight_grad: format of the matched kernels' gradients.
        moments: formats of Adam's first and second moment. E4M4, a byte without a sign and with a scale for
            each 128 entries, is for the second one's "root".
        rounding: how the optimizer rounds (first moment, weight, second moment) to their formats. The weight
            is the master weight where there is one. "stochastic" rounds up or down at random, without bias.
            "kahan" stores what rounding took from the weight, in one more byte. "root" stores the second
            moment's root, rounded stochastically, which covers twice the exponents of the "value".
        scaling: "delayed" computes the scale of a GEMM operand from the amaxes of previous steps, "current"
            from the tensor itself. "block" has a power-of-two scale for each 1x128 inputs and output
            gradients and each 128x128 weights (DeepSeek-V3's), "block_float32" a float32 one; "mxfp8" an
            E8M0 scale for each 32; "nvfp4" an E4M3 scale for each 16 of E2M1. See `fp8jax.scaling.block`.
        fp8_format: "HYBRID" is E4M3 for inputs and weights, E5M2 for output gradients; "E4M3" is E4M3 for
            all.
        fp4_options: for "nvfp4": "hadamard" transforms the operands of the wgrad GEMM, "stochastic" rounds
            output gradients at random, "2d" gives weights 16x16 blocks; "46" chooses between two scales of a
            block, "eden" rotates the operands of dgrad and wgrad, see `fp8jax.quantization.fp4`.
        margin: scales are multiplied by 2**margin, as headroom.
        interval: number of steps between two updates of a delayed scale.
        amax_history_len: number of steps in the amax history of delayed scaling.
        amax_compute_algo: delayed scaling uses the "max" of the history, or its "most_recent" amax.
        override_linear_precision: (fprop, dgrad, wgrad), True for each GEMM that runs in high precision
            instead of FP8.
        first_scale: delayed scaling's scale before the first amax: a "typical" tensor's; the scale of
            the first "tensor", which makes every cast wait for an amax; or "one", as in TransformerEngine.
        include: shell-style patterns of layers. A pattern with "/" is compared with a layer's path, a pattern
            without "/" with the last name of the path. "re:" starts a regular expression of the path.
        exclude: patterns of layers that are not matched although they are included.

    Raises:
        ValueError: a value is not legal, or two values contradict each other.
    """

    gemm: str = "FP8"
    comm: str = "FP32"
    weight: str = "FP32"
    master_weight: str = "-"
    weight_grad: str = "FP32"
    moments: tuple[str, str] = ("FP32", "FP32")
    rounding: tuple[str, str, str] = ("nearest", "nearest", "value")
    scaling: str = "delayed"
    fp8_format: str = "HYBRID"
    fp4_options: tuple[str, ...] = ("hadamard", "stochastic", "2d")
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
    FP8: ClassVar["Recipe"]
    BLOCK: ClassVar["Recipe"]
    MXFP8: ClassVar["Recipe"]
    NVFP4: ClassVar["Recipe"]

    def __post_init__(self) -> None:
        legal_values.check(self)

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
        """TransformerEngine's `DelayedScaling`.

        The arguments are the attributes of the same names. `first_scale="one"` reproduces TransformerEngine's
        first steps, too.
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
    def from_te(cls, source: object) -> "Recipe":
        """The recipe of TransformerEngine's recipe object.

        Args:
            source: a `DelayedScaling`, `Float8CurrentScaling`, `Float8BlockScaling`, `MXFP8BlockScaling` or
                `NVFP4BlockScaling`. They give `te`, `te,scaling=current`, `block`, `mxfp8` and `nvfp4`, with
                the object's settings.

        Raises:
            ValueError: another object, or a setting that no recipe has.

        References:
            TransformerEngine 2.20, common/recipe/__init__.py.
        """
        preset, changes = from_te.read(source)
        return dataclasses.replace(PRESETS[preset], **changes)

    @classmethod
    def from_accelerate(
        cls,
        source: "str | os.PathLike[str] | object | None" = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> "Recipe":
        """The recipe of Hugging Face Accelerate's settings.

        `mixed_precision` no, fp16 and bf16 give `fp32`, `fp16_amp` and `bf16`. fp8 with backend TE gives
        `Recipe.te` with the settings of the same names, or `mxfp8` with use_mxfp8_block_scaling; with backend
        MSAMP it gives `O1` or `O2`, by
        `opt_level`. Without a backend it is MSAMP if `opt_level` is given, otherwise TE. Missing settings
        have Accelerate's defaults: O2, and amax_compute_algo most_recent where `Recipe.te` has max.

        `use_autocast_during_eval` does not change the recipe. For evaluation in FP8 (True) call
        `model.apply(variables, x)`; in high precision (False, Accelerate's default)
        `module.apply(model.dequantize(variables), x)`.

        Args:
            source: an object with Accelerate's attributes (`TERecipeKwargs(...)`, `MSAMPRecipeKwargs(...)`,
                `FP8RecipeKwargs(...)`), a mapping of such settings or of a whole configuration, the path of a
                `config.yaml`, or None for the environment. Keys may have any case, a prefix "fp8_" and the
                spellings of Accelerate's questionnaire.
            environ: mapping with ACCELERATE_MIXED_PRECISION and ACCELERATE_FP8_*; by default `os.environ`.

        Raises:
            ValueError: a key or value is unknown or contradicts another, or no recipe has the setting:
                torchao's settings, the format E5M2.
            ImportError: `source` is a file, and PyYAML is not installed.

        References:
            Accelerate 1.15.0, utils/dataclasses.py and commands/launch.py.
        """
        preset, changes = from_accelerate.read(source, environ)
        return dataclasses.replace(PRESETS[preset], **changes)

    def with_plain_weights(self) -> "Recipe":
        """The recipe with plain weights and gradients, in the parameters' dtypes."""
        rounding = (self.rounding[0], "nearest", self.rounding[2])
        return dataclasses.replace(
            self, weight="FP32", weight_grad="FP32", master_weight="-", rounding=rounding
        )

    @classmethod
    def parse(cls, text: "str | Recipe") -> "Recipe":
        """The recipe of a preset's name and `,field=value` changes; the inverse of `str`.

        `current` is short for `te,scaling=current`, and `fp8_6` for `fp8,moments=E5M2+E4M4`, 6 bytes per
        parameter.

        Tuples are written with "+": `moments=E4M3+FP16`, `exclude=lm_head+*/out`; no text is the empty tuple.

        Raises:
            ValueError: an unknown preset or field, or an illegal value; the message lists the legal ones.
        """
        if isinstance(text, Recipe):
            return text
        name, *changes = str(text).split(",", 1)
        preset = (PRESETS | COMBINED | SHORT).get(name.strip())
        if preset is None:
            raise ValueError(
                f"recipe: expected one of {', '.join(PRESETS | SHORT)}, or block, mxfp8 or nvfp4 with +O1, "
                f"+O2, +O3 or +fp8; got {name.strip()!r}."
            )
        return dataclasses.replace(preset, **(parse_changes(changes[0]) if changes else {}))

    def __str__(self) -> str:
        def changes(preset: Recipe) -> list[str]:
            names = [field.name for field in dataclasses.fields(self)]
            different = [name for name in names if getattr(self, name) != getattr(preset, name)]
            return [f"{name}={legal_values.shown(getattr(self, name))}" for name in different]

        # A preset with the same options: "te,scaling=current,fp8_format=E4M3", not "block,scaling=current".
        options = legal_values.FIELDS_OF_SCALING[self.scaling if self.is_quantized else Recipe.scaling]
        presets = PRESETS | COMBINED
        alike = [name for name in presets if legal_values.FIELDS_OF_SCALING[presets[name].scaling] == options]
        return ",".join(min(([name, *changes(presets[name])] for name in alike or presets), key=len))

    @property
    def is_quantized(self) -> bool:
        """Whether GEMMs are in FP8 or FP4."""
        return self.gemm in ("FP8", "FP4")

    @property
    def gemm_formats(self) -> tuple[str, str]:
        """Names of the formats of a quantized GEMM's forward operands and output gradient."""
        if self.gemm == "FP4":
            return ("E2M1", "E2M1")
        return ("E4M3", "E4M3" if self.fp8_format == "E4M3" else "E5M2")

    @property
    def lost_to_rounding(self) -> str:
        """A report's line on what the optimizer loses by rounding to nearest; empty if nothing."""
        lost = []
        if self.moments[0] != "FP32" and self.rounding[0] == "nearest":
            lost.append(f"{self.moments[0]} first moments do not decay to zero")
        weight = self.weight if self.master_weight == "-" else self.master_weight
        if weight == "FP16" and self.rounding[1] == "nearest":
            lost.append("FP16 weights ignore updates below half of their last bit")
        return f"rounded to nearest: {', '.join(lost)}; the recipe fp8 avoids this" if lost else ""


def check_weights(recipe: Recipe, formats: Collection[str]) -> None:
    """Raises ValueError if an optimizer's recipe does not fit the weights' formats.

    Without scaled weights any recipe fits: excluded layers are plain at every level. If rules give the
    weights several formats, the recipe must have one of them, and master weights if any weight is E4M3.

    Args:
        recipe: the optimizer's recipe.
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
        ValueError: an unknown field, or one that is given twice.
    """
    return legal_values.parsed(text, {field.name: field.default for field in dataclasses.fields(Recipe)})


# MS-AMP's linear layers have a history of 16 amaxes.
_O1 = Recipe(comm="FP8", weight="FP16", weight_grad="E4M3", amax_history_len=16)
_O2 = dataclasses.replace(_O1, moments=("E4M3", "FP16"))

PRESETS: dict[str, Recipe] = {
    "fp32": Recipe(gemm="FP32"),
    "bf16": Recipe(gemm="BF16"),
    "fp16_amp": Recipe(gemm="FP16"),
    "te": Recipe(),
    "O1": _O1,
    "O2": _O2,
    "O3": dataclasses.replace(_O2, weight="E4M3", master_weight="FP16"),
    "te+O2": dataclasses.replace(_O2, amax_history_len=Recipe.amax_history_len),
    "fp8": dataclasses.replace(_O2, moments=("E5M2", "FP16"), rounding=("stochastic", "kahan", "root")),
    "block": Recipe(scaling="block", fp8_format="E4M3"),
    "mxfp8": Recipe(scaling="mxfp8", fp8_format="E4M3"),
    "nvfp4": Recipe(gemm="FP4", scaling="nvfp4", fp8_format="E4M3"),
}
for _name, _preset in PRESETS.items():
    setattr(Recipe, _name.upper().replace("+", "_"), _preset)

# Names that `str` does not use.
SHORT = {
    "current": dataclasses.replace(Recipe.TE, scaling="current"),
    "fp8_6": dataclasses.replace(Recipe.FP8, moments=("E5M2", "E4M4")),  # bytes per parameter
}

_GEMM_COLUMN = ("gemm", "scaling", "fp8_format", "amax_history_len")

# Block scaling with the other columns of MS-AMP's levels and of fp8.
COMBINED: dict[str, Recipe] = {
    f"{of_gemm}+{of_others}": dataclasses.replace(
        PRESETS[of_others], **{name: getattr(PRESETS[of_gemm], name) for name in _GEMM_COLUMN}
    )
    for of_gemm in ("block", "mxfp8", "nvfp4")
    for of_others in ("O1", "O2", "O3", "fp8")
}
