"""`advise`: which recipe, which layers to keep out of FP8, and which scaling, with the figures behind it.

    print(fp8jax.advise(found, target="h100"))

A layer is bad under a recipe if one of its tensors is not finite, if a tenth of the channels of an operand
have less than 10 dB of signal to quantization noise, or if a thousandth of an operand saturates. Underflow
alone is no reason: numbers far below all others of their channel add nothing to a GEMM.
"""

import collections
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from fp8jax import backends, scaling
from fp8jax.inspect import targets
from fp8jax.inspect.numerics.measures import OPERANDS, key_of
from fp8jax.inspect.numerics.rows import WEAK, OperandRow, Rows, Statistics, note_of
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Rule
from fp8jax.rewrite.patterns import pattern_of
from fp8jax.scaling import LHS, with_fresh_scales

# Shares of the channels, and of the entries, of an operand.
WEAK_SHARE, SATURATED_SHARE = 0.1, 1e-3
# The recipes that are compared, by their names; the first that a GPU multiplies is advised.
COMPARED = {name: Recipe.parse(name) for name in ("mxfp8", "current", "block")}
# So many times the largest amax before it, an amax is a jump: delayed scaling clips it.
JUMP = 2.0


class Advice(NamedTuple):
    """A recipe, rules and options; `str` gives lines to paste, with each reason as a comment below them."""

    recipe: str
    rules: tuple[Rule, ...]
    reasons: tuple[str, ...]
    checkpointing: str = "none"  # `gradient_checkpointing` of `transform`
    zero: tuple[int, int] | None = None  # devices and stage of ZeRO, where they were planned

    def planned(self, devices: int, stage: int, checkpointing: str, figure: str) -> "Advice":
        """The same advice with ZeRO's stage and `gradient_checkpointing`, for this figure."""
        recipe = Recipe.parse(self.recipe)
        window = (
            f", amax_history_len={recipe.amax_history_len}" if with_fresh_scales(recipe) != recipe else ""
        )
        scale = f"scaling={recipe.scaling}{window}" if recipe.is_quantized else f"gemm={recipe.gemm}"
        loop = (
            f'fp8jax.optim.adamw(3e-4, "{self.recipe}", zero=zero), fp8jax.value_and_grad(loss_fn, zero=zero)'
        )
        reasons = (figure, *([f"and in the loop: {loop}"] if devices > 1 else []), f"it has {scale}")
        return self._replace(
            reasons=(*reasons, *self.reasons), zero=(devices, stage), checkpointing=checkpointing
        )

    def __str__(self) -> str:
        options = [f'"{self.recipe}"']
        if self.rules:
            options.append(f"rules=[{', '.join(f'fp8jax.{rule}' for rule in self.rules)}]")
        if self.checkpointing != "none":
            options.append(f'gradient_checkpointing="{self.checkpointing}"')
        lines = [f"model = fp8jax.transform(model, {', '.join(options)})"]
        if self.zero is not None and self.zero[0] > 1:
            _, stage = self.zero
            lines.append(f'zero = fp8jax.comm.Zero(jax.sharding.Mesh(jax.devices(), "data"), stage={stage})')
        return "\n".join([*lines, *(f"# {reason}" for reason in self.reasons)])


def recipe_for(target: str | targets.Target) -> str:
    """The recipe with small states that a GPU multiplies: `mxfp8+fp8`, `fp8`, or `bf16` without FP8 GEMMs."""
    device = targets.get(target).as_device
    return next((name for name in ("mxfp8+fp8", "fp8") if _runs(Recipe.parse(name), device)), "bf16")


def advise(
    found: Statistics | Iterable[OperandRow] | Iterable[Statistics] | Iterable[Iterable[OperandRow]],
    *,
    target: str | targets.Target | None = None,
    recipe: Recipe | str | None = None,
) -> Advice:
    """Advice from the statistics of a model.

    Args:
        found: statistics of one batch, or their rows; or a list of these for several batches of a run, oldest
            first, which also says whether amaxes jump.
        target: the GPU that is to train, see `fp8jax.inspect.targets`; None for this process's device.
        recipe: the recipe to advise layers for. None is the recipe of the model that was measured; for a
            plain model the one of `mxfp8`, `current` and `block` with the fewest bad layers, of those that
            `found` has and the GPU multiplies. A layer with a rule of a transformed model is judged by its
            recipe in this model. `te`, `O2` and `fp8` need rows of a recipe with the same casts, as `O2`.

    Returns:
        The recipe, and a rule for each bad layer that keeps it in bfloat16, before the rules of the model
        that was measured. The reasons name the operand and the figure. A layer that is bad for delayed scales
        alone, where rows `with_fresh_scales` tell, gets no rule: its reason is current scaling.

    Raises:
        ValueError: `found` is empty or lacks the recipe, or the GPU does not multiply its operands.
    """
    series = _series(found)
    rows = _Measured.of(series)
    measured = {row.layer for row in rows.rows}
    unmeasured = dict.fromkeys(x for each in series for x in each.unmeasured if x not in measured)
    if not measured:
        why = f" No gradient reaches: {', '.join(unmeasured)}." if unmeasured else ""
        raise ValueError(f"`found`: expected statistics from `fp8jax.statistics` with rows; got none.{why}")
    device = None if target is None else targets.get(target).as_device
    others = {name: each for name, each in COMPARED.items() if _runs(each, device) and rows.under(each)}
    chosen = _chosen(rows, recipe, others)
    name, of_layers = _name(chosen), rows.recipes(chosen)
    backends.choose("auto", scaling.of_recipe(chosen).granularity, device=device)
    fresh = {row.layer for row in rows.under(chosen, is_fresh=True)}
    healthy, bad = fresh - rows.bad(chosen, is_fresh=True).keys(), rows.bad(chosen)
    stale = {layer: bad.pop(layer) for layer in list(bad) if layer in healthy}
    reasons = [f"{layer}: {why} with {_name(of_layers[layer])}" for layer, why in bad.items()]
    reasons = reasons or [_no_bad(rows.under(chosen, is_fresh=bool(stale)))]
    reasons += [
        f"what if {other}: {len(rows.bad(each))} of {len(measured)} layers are bad, {name} has {len(bad)}"
        for other, each in others.items()
        if each != chosen
    ]
    if stale:
        layer, why = next(iter(stale.items()))
        share = f"{len(stale)} of {len(measured)}"
        reasons.append(f"scaling=current: delayed scales alone make {share} layers bad, as {layer}: {why}")
    elif scaling.of_recipe(chosen).granularity == "tensor":
        reasons += _jumps([rows._replace(rows=list(each)).under(chosen) for each in series], set(bad))
    paths = list(dict.fromkeys(layer.partition("#")[0] for layer in bad))
    # A rule for a path comes first. `transform` refuses a later rule without any other layer.
    of_model = [rule for rule, layers in series[-1].rules if not set(layers) <= set(paths)]
    rules = dict.fromkeys([*(Rule(pattern_of(path)) for path in paths), *of_model])
    return Advice(name, tuple(rules), (*reasons, *note_of(unmeasured)))


class _Measured(NamedTuple):
    """Rows of several batches."""

    rows: list[OperandRow]
    model: Recipe | None  # of the model that was measured; None for a model without FP8
    own: dict[str, Recipe]  # of its layers
    ruled: dict[str, Recipe]  # of its layers with a rule

    @classmethod
    def of(cls, series: list[Rows]) -> "_Measured":
        """The rows of all batches."""
        rows = [row for each in series for row in each]
        own = {row.layer: Recipe.parse(row.recipe) for row in rows if row.is_own}
        counted = collections.Counter(each for each in own.values() if each.is_quantized).most_common(1)
        if not counted:
            return cls(rows, None, {}, {})
        paths = {path for _, layers in series[-1].rules for path in layers}
        ruled = {layer: each for layer, each in own.items() if layer.partition("#")[0] in paths}
        # Older files do not have the model's recipe.
        return cls(rows, series[-1].recipe or counted[0][0], own, ruled)

    def recipes(self, recipe: Recipe) -> dict[str, Recipe]:
        """The recipe of each layer in a model of this recipe, without the layers that are not in FP8."""
        of_layers = self.own if recipe == self.model else self.ruled
        wanted = {row.layer: of_layers.get(row.layer, recipe) for row in self.rows}
        return {layer: each for layer, each in wanted.items() if each.is_quantized}

    def under(self, recipe: Recipe, *, is_fresh: bool = False) -> list[OperandRow]:
        """The rows of each layer under its recipe in `recipes`, or under recipes that quantize this operand
        alike; [] for a recipe that was not measured.

        For a layer's own recipe they are its own rows, with its state; with `is_fresh` the rows with scales
        of the same batch instead.
        """
        wanted = self.recipes(recipe)
        wanted = {layer: with_fresh_scales(each) if is_fresh else each for layer, each in wanted.items()}

        def fits(row: OperandRow) -> bool:
            if wanted[row.layer] == self.own.get(row.layer):
                return row.is_own
            measured, operand = Recipe.parse(row.recipe), OPERANDS.index(row.operand)
            is_alike = key_of(measured, operand) == key_of(wanted[row.layer], operand)
            return measured.is_quantized and is_alike and not row.is_own

        found = [row for row in self.rows if row.layer in wanted and fits(row)]
        # All recipes without FP8 weight gradients have the same rows of these, and a layer with a rule has
        # rows under each recipe.
        inputs = {row.layer for row in found if row.operand == OPERANDS[LHS]}
        return found if inputs & (wanted.keys() - self.ruled.keys() or inputs) else []

    def bad(self, recipe: Recipe, *, is_fresh: bool = False) -> dict[str, str]:
        """The bad layers, each with its worst figure."""
        worst: dict[str, tuple[float, str]] = {}
        for row in self.under(recipe, is_fresh=is_fresh):
            for badness, why in _faults(row):
                if badness > worst.get(row.layer, (0.0, ""))[0]:
                    worst[row.layer] = (badness, f"{row.operand}{row.place}: {why}")
        return {layer: why for layer, (_, why) in worst.items()}


def _series(found: Any) -> list[Rows]:
    """The rows of each batch."""
    given: list[Any] = [found] if isinstance(found, Statistics | Rows) else list(found)
    given = [given] if given and isinstance(given[0], OperandRow) else given
    given = [each.rows if isinstance(each, Statistics) else each for each in given]
    return [each if isinstance(each, Rows) else Rows(tuple(each)) for each in given]


def _runs(recipe: Recipe, device: backends.Device | None) -> bool:
    """Whether a device multiplies the operands; a CPU, which emulates all, is taken for an H100."""
    device = device or backends.Device.here()
    device = targets.get("h100").as_device if device.platform == "cpu" else device
    return backends.why_not("auto", scaling.of_recipe(recipe).granularity, device=device) is None


def _name(recipe: Recipe) -> str:
    return next((name for name, each in COMPARED.items() if each == recipe), str(recipe))


def _chosen(rows: _Measured, recipe: Recipe | str | None, others: dict[str, Recipe]) -> Recipe:
    """The recipe to advise layers for."""
    given, measured = recipe or rows.model, ", ".join(dict.fromkeys(row.recipe for row in rows.rows))
    if given is not None:
        chosen = Recipe.parse(given)
        if not (chosen.is_quantized or chosen == rows.model) or not rows.under(chosen):
            raise ValueError(
                f"`recipe`: expected one in FP8 that `found` has measured, one of {measured}; got {chosen}."
            )
        return chosen
    if not others:
        raise ValueError(
            f"`found`: expected rows of {', '.join(COMPARED)}, whichever the GPU multiplies; got rows of "
            f"{measured}. Measure these `recipes`, or name one."
        )
    return min(others.values(), key=lambda each: len(rows.bad(each)))


def _faults(row: OperandRow) -> Iterable[tuple[float, str]]:
    """The faults of the operand of a row, each with a measure; none for a healthy one."""
    if not math.isfinite(row.amax):
        yield math.inf, "it has NaN or infinities"
    elif row.weak >= WEAK_SHARE * row.channels:
        outliers = f", outlier channels: {row.outliers}" if row.outliers else ""
        yield (
            row.weak / row.channels,
            f"{row.weak} of {row.channels} channels below {WEAK:.0f} dB, {100 * row.underflow:.1f}% "
            f"underflow, amax {row.amax:.3g}{outliers}",
        )
    # NVFP4's scales of blocks are rounded, so that the largest entries of some blocks saturate.
    if row.saturation >= SATURATED_SHARE and Recipe.parse(row.recipe).gemm != "FP4":
        yield row.saturation, f"{100 * row.saturation:.2f}% saturate"


def _no_bad(rows: list[OperandRow]) -> str:
    """The figure of the worst layer, where none is bad."""
    worst = max(rows, key=lambda row: row.weak / max(row.channels, 1))
    return (
        f"no layer of {len({row.layer for row in rows})} is bad: at most {worst.weak} of {worst.channels} "
        f"channels are below {WEAK:.0f} dB ({worst.name}, {worst.operand})"
    )


def _jumps(series: list[list[OperandRow]], bad: set[str]) -> list[str]:
    """Reasons for or against delayed scaling, by the amaxes of several batches."""
    amaxes: dict[tuple[str, str], list[float]] = {}
    for rows in series if len(series) > 1 else ():
        # Recipes with the same cast have a row each.
        for key, row in {(row.name, row.operand): row for row in rows}.items():
            if row.layer not in bad and row.operand != "weight gradient":
                amaxes.setdefault(key, []).append(row.amax)
    jumps = [
        (seen[i] / max(seen[:i]), *key)
        for key, seen in amaxes.items()
        for i in range(1, len(seen))
        if max(seen[:i])
    ]
    if not jumps:
        return []
    jump, name, operand = max(jumps)
    figure = f"an amax is at most {jump:.2f} times the largest before it ({name}, {operand})"
    if jump > JUMP:
        return [f"scaling=current: {figure}, which delayed scaling clips"]
    return [f"scaling=delayed is as good: {figure}; so is amax_history_len={_window(amaxes.values())}"]


def _window(amaxes: Iterable[list[float]]) -> int:
    """The shortest history, of 1, 16 or 1024 batches, that no amax exceeds `JUMP` times."""
    for length in (1, 16):
        parts = [(x[i], max(x[max(i - length, 0) : i])) for x in amaxes for i in range(1, len(x))]
        if all(new <= JUMP * old for new, old in parts):
            return length
    return 1024
