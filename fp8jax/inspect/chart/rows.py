"""Rows of the chart, declared by a recipe and measured in its train step; as text, data and a picture."""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax import adapters, backends, optim, scaling
from fp8jax.dot import state_names
from fp8jax.extras import need
from fp8jax.inspect import program, targets
from fp8jax.inspect.chart import readers
from fp8jax.inspect.chart.readers import NEEDS, SHAPES, TOKENS, WIDTH, bits_of, mixed, mlp
from fp8jax.inspect.step import training_step
from fp8jax.inspect.subject import loss_of
from fp8jax.inspect.tables import align
from fp8jax.optim.state import is_adam_state
from fp8jax.recipe import PRESETS, Recipe
from fp8jax.variables import PARAMS

# Column -> heading.
HEADINGS = {
    "gemm": "GEMM",
    "scaling": "scaling",
    "comm": "comm",
    "weight": "weight",
    "master_weight": "master",
    "weight_grad": "weight gradient",
    "moments": "moments",
    "rounding": "rounding",
    "residuals": "residuals",
    "needs": "needs",
}
COLUMNS = tuple(HEADINGS)


class Cell(NamedTuple):
    """One cell. Printed, it has the measured formats, and the declared ones where they differ."""

    declared: str  # formats: "FP8"; "FP8 + FP16" for two moments; "FP16 / FP8" where they are mixed
    formats: str  # the measured ones
    evidence: str  # the arrays and operations that have these formats

    @property
    def differs(self) -> bool:
        """Whether the program differs from the recipe."""
        return self.declared != self.formats

    def __str__(self) -> str:
        return f"{self.formats} (declared {self.declared})" if self.differs else self.formats


class ChartRow(NamedTuple):
    """One level of the chart."""

    recipe: str
    devices: str  # that the step was compiled for: "8 x h200"
    cells: dict[str, Cell]  # by column
    backend: str  # that multiplies in FP8 or FP4, from the model's report; "-" without such GEMMs

    @property
    def differences(self) -> list[str]:
        """The columns in which the program differs from the recipe."""
        return [column for column, cell in self.cells.items() if cell.differs]


def declare(
    recipe: Recipe, devices: int = 2, *, activations: str = "FP32", gradient_checkpointing: str = "none"
) -> dict[str, str]:
    """A recipe's row of the chart. Nothing crosses between devices if there is one.

    Args:
        recipe: the recipe.
        devices: how many share the batch.
        activations: the format between GEMMs.
        gradient_checkpointing: as in `transform`.
    """
    row = {column: getattr(recipe, column) for column in COLUMNS if column not in ("residuals", "needs")}
    row["comm"] = row["comm"] if devices > 1 else "-"
    row |= {column: " + ".join(row[column]) for column in ("moments", "rounding")}
    row = {column: re.sub("E4M3|E4M4|E5M2", "FP8", formats) for column, formats in row.items()}
    scales = scaling.of_recipe(recipe).scales if recipe.is_quantized else "-"
    is_plain = recipe.weight == recipe.weight_grad == "FP32" and recipe.gemm != "FP16"
    needs = NEEDS[bool(state_names(recipe)) if is_plain else 2]
    is_high_precision = recipe.is_quantized and recipe.override_linear_precision[2]
    operands = {activations, activations if is_high_precision else recipe.gemm}
    saved = {"none": operands, "fp8": {activations, recipe.gemm}}
    saved |= {"dots_fp8": {activations, "FP8"}, "dots_fp8_inputs": {"FP8"}}
    residuals = mixed(saved.get(gradient_checkpointing, {activations}))
    return {**row, "scaling": scales, "residuals": residuals, "needs": needs}


def lacking(target: str | None, recipes: Mapping[str, Recipe] = PRESETS) -> dict[str, str]:
    """The recipes with GEMMs that a GPU or this machine lacks, and the reasons.

    Args:
        target: as in `measure`.
        recipes: by name.
    """
    device = targets.get(target).as_device if target else None
    reasons = {
        name: backends.why_not("auto", scaling.of_recipe(recipe).granularity, device=device)
        for name, recipe in recipes.items()
        if recipe.is_quantized
    }
    return {name: reason for name, reason in reasons.items() if reason}


def measure(
    recipe: Recipe | str,
    *,
    target: str | None = None,
    devices: int = 8,
    gradient_checkpointing: str = "none",
) -> ChartRow:
    """Compiles a train step under the recipe and reads its row.

    Args:
        recipe: a `Recipe`, or the text of one.
        target: name of a GPU that is not here (`targets.TARGETS`), or None for this machine's devices.
        devices: how many share the batch.
        gradient_checkpointing: of the layer whose residuals are read; as in `transform`.

    Raises:
        ValueError: the recipe cannot be parsed, no such target, this machine has fewer devices, or the
            recipe cannot save what `gradient_checkpointing` says.
        RuntimeError: the packages that compile for a target are missing.
    """
    recipe = Recipe.parse(recipe)
    model = adapters.transform(mlp, recipe)
    options: dict[str, Any] = {"target": target, "devices": devices}
    dtype = jnp.float32 if target is None else jnp.bfloat16
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    loss_fn, args = loss_of(model, (params, x))
    step = training_step(loss_fn, *args, recipe=recipe, optimizer=optim.adamw, **options)
    lowered = targets.lower_for(step.function, *step.args, donate_argnums=(0, 1), **options)
    read = program.read(targets.compile(lowered, target))
    device = targets.mesh(target, devices).devices.flat[0]
    variables, state, _ = lowered.out_info
    _, grads, _ = jax.eval_shape(step.value_and_grad, step.args[0], *step.args[2:])
    moments = map(readers.of_arrays, optim.moments(state))
    [adam] = (node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node))
    measured = {
        "gemm": readers.of_gemms(program.read_lowered(lowered) if device.platform == "cpu" else read.gemms),
        "scaling": readers.of_scales(loss_fn, *args),
        "comm": readers.of_collectives(read.collectives, devices),
        "weight": readers.of_arrays(variables[PARAMS]),
        "master_weight": readers.of_arrays(adam.master),
        "weight_grad": readers.of_arrays(grads),
        "moments": tuple(" + ".join(parts) for parts in zip(*moments, strict=True)),
        "rounding": readers.of_rounding(model, recipe),
        "residuals": readers.of_residuals(recipe, dtype, gradient_checkpointing),
        "needs": readers.of_needs(args[0], grads),
    }
    activations = readers.format_of(jnp.dtype(dtype).name)
    declared = declare(
        recipe, devices, activations=activations, gradient_checkpointing=gradient_checkpointing
    )
    cells = {column: Cell(declared[column], *measured[column]) for column in COLUMNS}
    names = dict.fromkeys(row.backend for row in model.report(params, x).rows if row.fp8)
    return ChartRow(
        str(recipe), f"{devices} x {target or device.device_kind}", cells, ", ".join(names) or "-"
    )


# Output ##########################################################################################


def table(rows: list[ChartRow]) -> str:
    """The measured chart as text; a cell that differs from its declaration shows both."""
    lines = [[row.recipe, *map(str, row.cells.values()), row.backend] for row in rows]
    return align([["recipe", *HEADINGS.values(), "backend"], *lines])


def text(rows: list[ChartRow], *, evidence: bool = False) -> str:
    """The chart, and on demand the arrays and operations behind each cell."""
    lines = [table(rows), "", _title(rows)]
    for row in rows if evidence else ():
        lines.append(row.recipe)
        for heading, cell in zip(HEADINGS.values(), row.cells.values(), strict=True):
            lines.append(f"  {heading:16} {cell.formats:12} {cell.evidence}")
    return "\n".join(lines)


def _title(rows: list[ChartRow]) -> str:
    where = f"read from a train step compiled for {rows[0].devices}"
    return f"{where}; residuals from the jaxpr of scanned layers"


def as_data(rows: list[ChartRow]) -> list[dict[str, Any]]:
    """The chart for JSON."""
    return [
        {"recipe": row.recipe, "backend": row.backend}
        | {column: cell._asdict() for column, cell in row.cells.items()}
        for row in rows
    ]


def new_figure(**size: Any) -> Any:
    """A figure of matplotlib; ImportError without it."""
    return need("matplotlib.figure").Figure(**size)


def picture(rows: list[ChartRow], path: str | os.PathLike[str]) -> None:
    """Draws the chart; a cell that differs from its declaration is red. Needs the `train` extra."""
    figure = new_figure(figsize=(9, 0.4 * len(rows) + 1), dpi=150)
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(_title(rows), fontsize=10)
    drawn = axes.table(
        [list(map(str, row.cells.values())) for row in rows],
        rowLabels=[row.recipe for row in rows],
        colLabels=list(HEADINGS.values()),
        cellColours=[list(map(_color, row.cells.values())) for row in rows],
        loc="center",
        cellLoc="center",
    )
    drawn.scale(1, 1.4)
    figure.savefig(path, bbox_inches="tight")


def _color(cell: Cell) -> str:
    """Red for a difference, else blue, darker for fewer bits."""
    if cell.differs:
        return "#e34948"
    bits = max(map(bits_of, cell.formats.split(" + ")))
    return {8: "#9ec5f4", 16: "#cfe3fb"}.get(bits, "#ffffff")
