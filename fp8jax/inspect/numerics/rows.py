"""`Statistics`, the numbers of all layers as a pytree, and `OperandRow`, one operand of a layer."""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.inspect.numerics.measures import OPERANDS
from fp8jax.inspect.numerics.recorder import Records
from fp8jax.inspect.tables import align
from fp8jax.recipe import Recipe
from fp8jax.rewrite import Rule
from fp8jax.rewrite.rules import UsedRule

# A channel is an outlier if its amax is so many times the median of the channels that are not zero.
OUTLIER = 20.0
# Of a run, beside its checkpoints.
FOLDER = "statistics"
# A channel is weak under a recipe if its signal to noise is below so many dB. Gaussian numbers have 31 in
# E4M3, 25 in E5M2 and 17 to 20 in NVFP4.
WEAK = 10.0
_HEAD = "layer  operand  recipe  amax  underflow  saturated  SQNR dB  range bits  weak  outliers".split("  ")


class OperandRow(NamedTuple):
    """One operand of one layer, quantized by one recipe."""

    layer: str  # the layer's path, as rules see it
    at: tuple[int, ...]  # its number in the stack that a scan runs, then the expert's; () for other layers
    operand: str  # "input", "kernel", "output gradient" or "weight gradient"
    recipe: str
    is_own: bool  # whether it is the recipe of this layer in the model that was measured
    amax: float  # the largest magnitude before quantization; inf for NaN, too
    underflow: float  # share of the nonzero values that become zero
    saturation: float  # share of the values above the largest number that their scale holds
    sqnr: float  # signal to quantization noise in dB; inf where nothing is rounded
    range: float  # log2 of the largest by the smallest nonzero magnitude after quantization
    weak: int  # channels with less signal to noise than `WEAK`, but not of zeros alone
    outliers: int  # channels with an amax above `OUTLIER` times the median channel's
    channels: int  # inputs for an input, outputs for an output gradient, both for a kernel and its gradient

    @property
    def place(self) -> str:
        """The index in a scan and of the expert, as text."""
        return "".join(f"[{number}]" for number in self.at)

    @property
    def name(self) -> str:
        """The layer's path, with the index in a scan and of the expert."""
        return self.layer + self.place


@dataclasses.dataclass(frozen=True)
class Rows(Sequence[OperandRow]):
    """A sequence of rows, and the model that they are of; a slice is of the same model.

    Attributes:
        rows: the rows.
        recipe: the recipe of a transformed model; None for a plain one, and in older files.
        rules: the rules of the model, or of `fp8jax.statistics` for a plain one.
        unmeasured: the layers without rows, since no gradient reaches them, as below a `stop_gradient`.
    """

    rows: tuple[OperandRow, ...] = ()
    recipe: Recipe | None = None
    rules: tuple[UsedRule, ...] = ()
    unmeasured: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> OperandRow: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "OperandRow | Rows":
        is_slice = isinstance(index, slice)
        return dataclasses.replace(self, rows=self.rows[index]) if is_slice else self.rows[index]


class MeasuredLayer(NamedTuple):
    """The layer and the recipes that a `Records` belongs to."""

    layer: str
    recipes: tuple[Recipe, ...]
    own: int | None  # the index of the layer's own recipe; None for a layer in high precision


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("records",), meta_fields=("layers", "recipe", "rules")
)
@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """The result of `fp8jax.statistics`. A pytree; `rows` and `str` read its arrays, outside of `jax.jit`.

    Attributes:
        records: for each layer its arrays.
        layers: for each layer its path and recipes.
        recipe, rules: see `Rows`.
    """

    records: tuple[Records, ...]
    layers: tuple[MeasuredLayer, ...]
    recipe: Recipe | None = None
    rules: tuple[UsedRule, ...] = ()

    def merged(self, other: "Statistics") -> "Statistics":
        """The statistics of both batches: shares and noise are means over uses, other numbers maxima."""
        if self.layers != other.layers:
            raise ValueError("`other`: expected statistics of the same layers and recipes; got others.")
        add = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731
        most = lambda a, b: jax.tree.map(jnp.maximum, a, b)  # noqa: E731
        both = (add, add, add, most, most)
        merged = [
            Records(*(merge(a, b) for merge, a, b in zip(both, *pair, strict=True)))
            for pair in zip(self.records, other.records, strict=True)
        ]
        return dataclasses.replace(self, records=tuple(merged))

    @property
    def rows(self) -> Rows:
        """The rows of all layers that were used, operand by operand."""
        pairs = list(zip(jax.device_get(self.records), self.layers, strict=True))
        rows = tuple(
            row
            for records, layer in pairs
            for index in np.ndindex(records.uses.shape)
            if records.uses[index]
            for row in _rows(layer, index, jax.tree.map(lambda x, at=index: x[at], records))
        )
        unmeasured = tuple(layer.layer for records, layer in pairs if not records.uses.any())
        return Rows(rows, self.recipe, self.rules, unmeasured)

    def __str__(self) -> str:
        rows = self.rows
        return "\n".join([table(rows), *note_of(rows.unmeasured)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows as JSON, for `load` and `fp8jax advise`."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(as_json(self.rows))


def as_json(rows: Iterable[OperandRow]) -> str:
    """The rows as `Statistics.save` writes them; null stands for a number that is not finite."""

    def finite(x: Any) -> Any:
        return None if isinstance(x, float) and not math.isfinite(x) else x

    rows = rows if isinstance(rows, Rows) else Rows(tuple(rows))
    content = {
        "recipe": None if rows.recipe is None else str(rows.recipe),
        "rules": [[rule.options(), layers] for rule, layers in rows.rules],
        "unmeasured": rows.unmeasured,
        "rows": [{name: finite(x) for name, x in row._asdict().items()} for row in rows],
    }
    return json.dumps(content, indent=1, allow_nan=False, default=lambda number: number.item())  # NumPy's


def load(path: str | os.PathLike[str]) -> Rows:
    """The rows that `Statistics.save` wrote.

    Raises:
        ValueError: the file has no such rows.
    """
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
            content = content if isinstance(content, dict) else {"rows": content}  # of version 0.1.0
            recipe = content.get("recipe")
            rules = (UsedRule(Rule(**rule), tuple(layers)) for rule, layers in content.get("rules", ()))
            of_model = recipe and Recipe.parse(recipe), tuple(rules), tuple(content.get("unmeasured", ()))
            return Rows(tuple(map(_from_json, content["rows"])), *of_model)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"`path`: expected rows of fp8jax.statistics in {path}; got {error}.") from None


def _from_json(content: dict[str, Any]) -> OperandRow:
    """The inverse of a row in `as_json`, except that an `sqnr` of -inf becomes NaN."""
    of_null = {"amax": math.inf, "sqnr": math.inf if content["amax"] is not None else math.nan}
    row = {name: of_null.get(name, math.nan) if x is None else x for name, x in content.items()}
    return OperandRow(**{**row, "at": tuple(content["at"])})


def files_of_run(run: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files of rows in the folder of a run of `fp8jax.train`, oldest first."""
    return sorted(pathlib.Path(run, FOLDER).glob("*.json"))


def load_run(run: str | os.PathLike[str]) -> list[Rows]:
    """The rows of a run of `fp8jax.train`, those of the oldest batch first.

    Raises:
        ValueError: it has none.
    """
    if found := [load(path) for path in files_of_run(run)]:
        return found
    raise ValueError(
        f"`run`: expected a run of fp8jax.train with --statistics and a recipe in FP8; {run} has no "
        f"{FOLDER}/*.json."
    )


def note_of(unmeasured: Iterable[str]) -> list[str]:
    """A line that names the layers that were not measured; none without such layers."""
    names = ", ".join(unmeasured)
    return [f"not measured, since no gradient reaches them: {names}"] if names else []


def table(rows: Iterable[OperandRow]) -> str:
    """The rows as text; the model's own recipe has a star."""
    cells = [
        (
            row.name,
            row.operand,
            row.recipe + "*" * row.is_own,
            f"{row.amax:.3g}",
            f"{100 * row.underflow:.2f}%",
            f"{100 * row.saturation:.2f}%",
            "-" if math.isinf(row.sqnr) else f"{row.sqnr:.1f}",
            f"{row.range:.1f}",
            str(row.weak),
            f"{row.outliers} of {row.channels}",
        )
        for row in rows
    ]
    return align([_HEAD, *cells])


def _rows(layer: MeasuredLayer, index: tuple[int, ...], records: Records) -> Iterable[OperandRow]:
    for number, operand in enumerate(OPERANDS):
        amaxes = records.channels[number]
        amax = max(float(x.max(initial=0)) for x in amaxes)
        outliers, count = sum(map(_outliers, amaxes)), sum(x.size for x in amaxes)
        for at, recipe in enumerate(layer.recipes):
            underflow, saturation, noise = (records.sums[number, at] / records.uses).tolist()
            largest, smallest = records.maxes[number, at].tolist()
            bits = largest + smallest if math.isfinite(largest + smallest) else 0.0
            sqnr = math.inf if noise == 0 else -10 * math.log10(noise) if noise > 0 else math.nan
            given = (layer.layer, tuple(map(int, index)), operand, str(recipe), at == layer.own)
            ratios = [x[at] / records.uses for x in records.noise[number]]
            weak = int(sum((each > 10 ** (-WEAK / 10)).sum() for each in ratios))
            yield OperandRow(*given, amax, underflow, saturation, sqnr, bits, weak, outliers, count)


def _outliers(amaxes: Any) -> int:
    nonzero = amaxes[amaxes > 0]
    return int((amaxes > OUTLIER * np.median(nonzero)).sum()) if nonzero.size else 0
