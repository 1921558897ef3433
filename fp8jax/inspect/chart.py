"""The precision chart, read back from compiled programs.

    rows = [measure(recipe) for recipe in PRESETS]      # one train step each, on several devices
    print(table(rows))

A recipe declares a format for each kind of tensor; `measure` compiles a data-parallel train step
of a small model under it and reads what the program has: the operands of its GEMMs, what crosses
between devices, the arrays that are kept. Nothing is read from the recipe. On a GPU that is not
here the GEMMs are those of the optimized program; a CPU multiplies FP8 in a wider format, so there
they are those of the program that XLA is given.
"""

import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fp8jax import adapters, comm, gradients, optim
from fp8jax.inspect import program, targets
from fp8jax.inspect.models import Block
from fp8jax.optim.state import is_adam_state
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS

COLUMNS = ("gemm", "comm", "weight", "master_weight", "weight_grad", "moments")
HEADINGS = ("GEMM", "comm", "weight", "master", "weight gradient", "moments")

WIDTH, TOKENS = 256, 128  # of the model, and per device

# Names of dtypes, XLA's and numpy's, as the chart has them. Bytes on the wire are FP8 codes.
_NAMES = {
    "f8e4m3fn": "FP8",
    "f8e5m2": "FP8",
    "u8": "FP8",
    "float8_e4m3fn": "FP8",
    "float8_e5m2": "FP8",
    "f16": "FP16",
    "float16": "FP16",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "f32": "FP32",
    "float32": "FP32",
}
_BITS = {"FP8": 8, "FP16": 16, "BF16": 16, "FP32": 32}


class Cell(NamedTuple):
    """One measured cell."""

    formats: (
        str  # "FP8", or more than one: "FP8 + FP16" of the two moments, "FP16 / FP8" where they are mixed
    )
    evidence: str  # what was found


class Row(NamedTuple):
    """One level of the chart."""

    recipe: str
    declared: dict[str, str]  # by column
    measured: dict[str, Cell]

    @property
    def differences(self) -> list[str]:
        """The columns in which the program is not what the recipe says."""
        return [column for column in COLUMNS if self.declared[column] != self.measured[column].formats]


def declare(recipe: Recipe) -> dict[str, str]:
    """A recipe's row of the chart, in the chart's words."""

    def word(name: str) -> str:
        return {"E4M3": "FP8"}.get(name, name)

    row = {column: word(getattr(recipe, column)) for column in COLUMNS[:-1]}
    return {**row, "moments": " + ".join(map(word, recipe.moments))}


def measure(recipe: Recipe | str, *, target: str | None = None, devices: int = 8) -> Row:
    """Compiles a train step under the recipe and reads its row.

    Args:
        recipe: a `Recipe`, or the text of one.
        target: name of a GPU that is not here (`targets.TARGETS`), or None for this machine's devices.
        devices: how many share the batch.

    Raises:
        ValueError: the recipe cannot be parsed, no such target, or fewer devices here.
        RuntimeError: the packages that compile for a target are missing.
    """
    recipe = Recipe.parse(recipe)
    mesh = targets.here(devices) if target is None else targets.mesh(target, devices)
    model = adapters.transform(Block(WIDTH), recipe)
    tx = optim.adamw(1e-3, recipe)
    dtype = jnp.float32 if target is None else jnp.bfloat16
    x = jax.ShapeDtypeStruct((devices * TOKENS, WIDTH), dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    opt_state = jax.eval_shape(tx.init, variables)

    def loss_fn(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    def step(variables: Any, opt_state: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        _, grads = gradients.value_and_grad(loss_fn)(variables, x)
        grads = comm.all_reduce(grads, "devices", recipe)
        updates, opt_state = tx.update(grads, opt_state, variables)
        # The gradients are given back, so that the program has them as the optimizer gets them.
        return gradients.apply_updates(variables, updates), opt_state, grads[PARAMS]

    all, parts = PartitionSpec(), PartitionSpec("devices")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(all, all, parts), out_specs=all, check_vma=False)
    placed = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec)
        ),
        (variables, opt_state, x),
        (jax.tree.map(lambda _: all, variables), jax.tree.map(lambda _: all, opt_state), parts),
    )
    lowered = jax.jit(sharded, donate_argnums=(0, 1)).lower(*placed)
    compiled = lowered.compile(compiler_options=None if target is None else targets.COMPILER_OPTIONS)
    read = program.read(compiled)
    new_variables, new_state, grads = lowered.out_info
    kernels = [new_variables[PARAMS][name]["kernel"] for name in ("up", "down")]
    measured = {
        "gemm": _gemm_cell(program.read_lowered(lowered) if _is_cpu(mesh) else read.gemms),
        "comm": _comm_cell(read.collectives, devices),
        "weight": _kept_cell(kernels),
        "master_weight": _master_cell(new_state),
        "weight_grad": _kept_cell([grads[name]["kernel"] for name in ("up", "down")]),
        "moments": _moments_cell(new_state),
    }
    return Row(str(recipe), declare(recipe), measured)


def _is_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _gemm_cell(gemms: Iterable[program.Gemm]) -> Cell:
    """The wider format of each product's operands."""
    gemms = list(gemms)
    found = [max(_names(gemm.lhs, gemm.rhs), key=_width) for gemm in gemms]
    shown = [f"{gemm.lhs} x {gemm.rhs} {gemm.kind}" for gemm in gemms]
    return Cell(_mixed(found), _counted(shown))


def _comm_cell(collectives: Iterable[program.Collective], devices: int) -> Cell:
    """The formats of what is as large as a kernel, or as a device's part of one."""
    collectives = [each for each in collectives if each.dtype in _NAMES]
    kernel = 4 * WIDTH * WIDTH
    large = [each for each in collectives if each.numbers >= kernel // devices]
    small = sum(each.numbers for each in collectives) - sum(each.numbers for each in large)
    shown = _counted([f"{each.kind} {each.dtype}[{each.numbers}]" for each in large])
    return Cell(_mixed(_names(*(each.dtype for each in large))), f"{shown}; {small} numbers in smaller ones")


def _kept_cell(leaves: list[Any]) -> Cell:
    """The formats of arrays that leave the program."""
    dtypes = [str(leaf.data.dtype if is_scaled(leaf) else leaf.dtype) for leaf in leaves]
    shown = [
        f"{dtype}{' with scale' if is_scaled(leaf) else ''}"
        for dtype, leaf in zip(dtypes, leaves, strict=True)
    ]
    return Cell(_mixed(_names(*dtypes)), _counted(shown))


def _master_cell(state: Any) -> Cell:
    (adam,) = (node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node))
    masters = jax.tree.leaves(adam.master, is_leaf=is_scaled)
    return _kept_cell(masters) if masters else Cell("-", "none in the optimizer's state")


def _moments_cell(state: Any) -> Cell:
    cells = [_kept_cell([tree[name]["kernel"] for name in ("up", "down")]) for tree in optim.moments(state)]
    return Cell(*(" + ".join(parts) for parts in zip(*cells, strict=True)))


def _names(*dtypes: str) -> list[str]:
    return [_NAMES.get(dtype, dtype) for dtype in dtypes]


def _width(name: str) -> int:
    return _BITS.get(name, 64)


def _mixed(names: list[str]) -> str:
    return " / ".join(sorted(set(names))) or "-"


def _counted(shown: list[str]) -> str:
    return ", ".join(f"{shown.count(each)} {each}" for each in dict.fromkeys(shown)) or "none"


def table(rows: list[Row]) -> str:
    """The measured chart as text; a cell that is not as declared says so."""
    cells = [["recipe", *HEADINGS]]
    for row in rows:
        cells.append([row.recipe, *(_shown(row, column) for column in COLUMNS)])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def evidence(rows: list[Row]) -> str:
    """What was found for each cell."""
    lines = []
    for row in rows:
        lines.append(row.recipe)
        for column, heading in zip(COLUMNS, HEADINGS, strict=True):
            lines.append(f"  {heading:16} {row.measured[column].formats:12} {row.measured[column].evidence}")
    return "\n".join(lines)


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    """The chart for JSON."""
    return [
        {
            "recipe": row.recipe,
            **{
                column: {"declared": row.declared[column], **row.measured[column]._asdict()}
                for column in COLUMNS
            },
        }
        for row in rows
    ]


def check_picture(path: Any) -> None:
    """Raises ValueError or RuntimeError if `picture` could not write there, before any work is done."""
    file, figures = pathlib.Path(path), _figure().canvas
    if file.is_dir():
        raise ValueError(f"`--png`: expected a file; got the folder {file}")
    if not file.parent.is_dir():
        raise ValueError(f"`--png`: {file.parent} is no folder; make it, or give another file than {file}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"`--png`: {file} cannot be written; give another file")
    if file.suffix and file.suffix[1:].lower() not in figures.get_supported_filetypes():
        raise ValueError(f"`--png`: expected a file like chart.png; got {file}")


def _figure(**size: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('drawing needs matplotlib: pip install "fp8jax[train]"') from None
    return Figure(**size)


def picture(rows: list[Row], path: Any, title: str) -> None:
    """Draws the chart as a PNG; a cell that is not as declared is red. Needs the `train` extra."""
    figure = _figure(figsize=(9, 0.4 * len(rows) + 1), dpi=150)
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(title, fontsize=10)
    drawn = axes.table(
        [[_shown(row, column) for column in COLUMNS] for row in rows],
        rowLabels=[row.recipe for row in rows],
        colLabels=HEADINGS,
        cellColours=[[_colour(row, column) for column in COLUMNS] for row in rows],
        loc="center",
        cellLoc="center",
    )
    drawn.scale(1, 1.4)
    figure.savefig(path, bbox_inches="tight")


def _shown(row: Row, column: str) -> str:
    found = row.measured[column].formats
    return found if column not in row.differences else f"{found} (declared {row.declared[column]})"


def _colour(row: Row, column: str) -> str:
    """Darker where narrower."""
    if column in row.differences:
        return "#e34948"
    bits = [_width(part) for part in row.measured[column].formats.split(" + ")]
    mean = math.prod(bits) ** (1 / len(bits))
    return {8: "#9ec5f4", 16: "#cfe3fb"}.get(round(mean), "#e3eefc" if mean < 32 else "#ffffff")
