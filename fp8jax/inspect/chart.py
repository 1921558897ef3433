"""The precision chart, read back from compiled programs.

    rows = [measure(recipe) for recipe in PRESETS]      # one train step each, on several devices
    print(table(rows))

A recipe declares a format for each kind of tensor. `measure` compiles a data-parallel train step of a small
model and reads the formats of its GEMM operands, collectives and arrays; it takes nothing from the recipe.
For a GPU that is not here, GEMMs are read from the optimized program. A CPU computes FP8 GEMMs in a wider
format, so there GEMMs are read from the lowered program.
"""

import collections
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import adapters, comm, gradients, optim
from fp8jax.inspect import program, targets
from fp8jax.inspect.models import Block
from fp8jax.inspect.tables import align
from fp8jax.optim.state import is_adam_state
from fp8jax.optim.step import Root
from fp8jax.quantization import is_scaled
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS

# Column -> heading.
HEADINGS = {
    "gemm": "GEMM",
    "comm": "comm",
    "weight": "weight",
    "master_weight": "master",
    "weight_grad": "weight gradient",
    "moments": "moments",
    "rounding": "rounding",
}
COLUMNS = tuple(HEADINGS)

WIDTH, TOKENS = 256, 128  # of the model, and per device
KERNELS = ("up", "down")

# Format -> dtypes, by XLA's names and numpy's. FP8 codes cross between devices as bytes.
_DTYPES = {
    "FP8": ("f8e4m3fn", "f8e5m2", "u8", "float8_e4m3fn", "float8_e5m2"),
    "FP16": ("f16", "float16"),
    "BF16": ("bf16", "bfloat16"),
    "FP32": ("f32", "float32"),
}
_FORMATS = {dtype: name for name, dtypes in _DTYPES.items() for dtype in dtypes}
_BITS = {"FP8": 8, "FP16": 16, "BF16": 16, "FP32": 32}


class Cell(NamedTuple):
    """One measured cell."""

    formats: str  # "FP8"; "FP8 + FP16" for two moments; "FP16 / FP8" where formats are mixed
    evidence: str  # the arrays and operations that have these formats


class Row(NamedTuple):
    """One level of the chart."""

    recipe: str
    devices: str  # that the step was compiled for: "8 x h200"
    declared: dict[str, str]  # column -> formats
    measured: dict[str, Cell]

    @property
    def differences(self) -> list[str]:
        """The columns in which the program differs from the recipe."""
        return [column for column in COLUMNS if self.declared[column] != self.measured[column].formats]

    def shown(self, column: str) -> str:
        """The measured formats, with the declared ones where they differ."""
        found = self.measured[column].formats
        return f"{found} (declared {self.declared[column]})" if column in self.differences else found


def declare(recipe: Recipe) -> dict[str, str]:
    """A recipe's row of the chart."""
    row = {column: getattr(recipe, column) for column in COLUMNS}
    row |= {column: " + ".join(row[column]) for column in ("moments", "rounding")}
    return {column: re.sub("E4M3|E5M2", "FP8", formats) for column, formats in row.items()}


def measure(recipe: Recipe | str, *, target: str | None = None, devices: int = 8) -> Row:
    """Compiles a train step under the recipe and reads its row.

    Args:
        recipe: a `Recipe`, or the text of one.
        target: name of a GPU that is not here (`targets.TARGETS`), or None for this machine's devices.
        devices: how many share the batch.

    Raises:
        ValueError: the recipe cannot be parsed, no such target, or this machine has fewer devices.
        RuntimeError: the packages that compile for a target are missing.
    """
    recipe = Recipe.parse(recipe)
    mesh = targets.mesh(target, devices)
    model = adapters.transform(Block(WIDTH), recipe)
    tx = optim.adamw(1e-3, recipe)

    def loss_fn(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    def step(variables: Any, opt_state: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        _, grads = gradients.value_and_grad(loss_fn)(variables, x)
        grads = comm.all_reduce(grads, "devices", recipe)
        updates, opt_state = tx.update(grads, opt_state, variables)
        # Returned gradients stay in the program as the optimizer gets them.
        return gradients.apply_updates(variables, updates), opt_state, grads[PARAMS]

    def placed(tree: Any, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, spec)), tree)

    x = jax.ShapeDtypeStruct((devices * TOKENS, WIDTH), jnp.float32 if target is None else jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec("devices"))
    args = map(placed, (variables, jax.eval_shape(tx.init, variables), x), specs)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    lowered = targets.lower_for(sharded, *args, target=target, devices=devices, donate_argnums=(0, 1))
    read = program.read(targets.compile(lowered, target))
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    new_variables, new_state, grads = lowered.out_info
    moments = [_arrays_cell(_kernels(tree)) for tree in optim.moments(new_state)]
    measured = {
        "gemm": _gemm_cell(program.read_lowered(lowered) if is_cpu else read.gemms),
        "comm": _comm_cell(read.collectives, devices),
        "weight": _arrays_cell(_kernels(new_variables[PARAMS])),
        "master_weight": _master_cell(new_state),
        "weight_grad": _arrays_cell(_kernels(grads)),
        "moments": Cell(*(" + ".join(parts) for parts in zip(*moments, strict=True))),
        "rounding": _rounding_cell(model, recipe),
    }
    where = f"{devices} x {target or mesh.devices.flat[0].device_kind}"
    return Row(str(recipe), where, declare(recipe), measured)


def _kernels(params: Any) -> list[Any]:
    return [params[name]["kernel"] for name in KERNELS]


def _gemm_cell(gemms: Sequence[program.Gemm]) -> Cell:
    """The wider operand's format of each GEMM."""
    wider = [max(_format(gemm.lhs), _format(gemm.rhs), key=_bits) for gemm in gemms]
    return Cell(_mixed(wider), _counted(f"{gemm.lhs} x {gemm.rhs} {gemm.kind}" for gemm in gemms))


def _comm_cell(collectives: Sequence[program.Collective], devices: int) -> Cell:
    """The formats of collectives with the size of a kernel or of one device's shard of a kernel."""
    found = [each for each in collectives if each.dtype in _FORMATS]
    large = [each for each in found if each.numbers >= 4 * WIDTH * WIDTH // devices]
    small = sum(each.numbers for each in found) - sum(each.numbers for each in large)
    shown = _counted(f"{each.kind} {each.dtype}[{each.numbers}]" for each in large)
    return Cell(_mixed(_format(each.dtype) for each in large), f"{shown}; {small} numbers in smaller ones")


def _arrays_cell(leaves: list[Any]) -> Cell:
    """The formats of arrays or `ScaledArray`s."""
    found = [
        (str(leaf.data.dtype), " with scale") if is_scaled(leaf) else (str(leaf.dtype), "")
        for leaf in jax.tree.leaves(leaves, is_leaf=is_scaled)
    ]
    return Cell(_mixed(_format(dtype) for dtype, _ in found), _counted(map("".join, found)))


def _master_cell(state: Any) -> Cell:
    (adam,) = (node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node))
    masters = jax.tree.leaves(adam.master, is_leaf=is_scaled)
    return _arrays_cell(masters) if masters else Cell("-", "none in the optimizer's state")


def _rounding_cell(model: Any, recipe: Recipe) -> Cell:
    """How a step on this machine rounds: what depends on the optimizer's seed is rounded stochastically."""
    variables = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), variables[PARAMS], is_leaf=is_scaled)

    def step(seed: int) -> tuple[Any, Any]:
        tx = optim.adamw(1e-3, recipe, seed=seed)
        updates, state = tx.update({PARAMS: grads}, tx.init(variables), variables)
        return gradients.apply_updates(variables, updates)[PARAMS], state

    (weights, state), (other_weights, other) = step(0), step(1)
    mu, nu = optim.moments(state)
    of_mu = "nearest" if _same(mu, optim.moments(other)[0]) else "stochastic"
    of_weight = "nearest" if _same((weights, state.master), (other_weights, other.master)) else "stochastic"
    is_root = all(isinstance(node, Root) for node in _kernels(nu))
    formats = (
        of_mu,
        "kahan" if jax.tree.leaves(state.remainder) else of_weight,
        "root" if is_root else "value",
    )
    return Cell(" + ".join(formats), "two steps with different seeds")


def _same(tree: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(bool(jnp.array_equal(one, two)) for one, two in pairs)


def _format(dtype: str) -> str:
    return _FORMATS.get(dtype, dtype)


def _bits(name: str) -> int:
    return _BITS.get(name, 64)


def _mixed(names: Iterable[str]) -> str:
    return " / ".join(sorted(set(names))) or "-"


def _counted(shown: Iterable[str]) -> str:
    return ", ".join(f"{count} {each}" for each, count in collections.Counter(shown).items()) or "none"


def table(rows: list[Row]) -> str:
    """The measured chart as text; a cell that differs from its declaration shows both."""
    lines = [[row.recipe, *map(row.shown, COLUMNS)] for row in rows]
    return align([["recipe", *HEADINGS.values()], *lines])


def text(rows: list[Row]) -> str:
    """The chart, and the arrays and operations behind each cell."""
    lines = [table(rows), "", f"{_title(rows)}:", ""]
    for row in rows:
        lines.append(row.recipe)
        for column, heading in HEADINGS.items():
            lines.append(f"  {heading:16} {row.measured[column].formats:12} {row.measured[column].evidence}")
    return "\n".join(lines)


def _title(rows: list[Row]) -> str:
    return f"read from a train step compiled for {rows[0].devices}"


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    """The chart for JSON."""
    return [
        {"recipe": row.recipe}
        | {name: {"declared": row.declared[name], **row.measured[name]._asdict()} for name in COLUMNS}
        for row in rows
    ]


def check_picture(path: str | os.PathLike[str]) -> None:
    """Checks that `picture` can write to the path, before any program is compiled.

    Raises:
        ValueError: the path is no writable file, or matplotlib does not know its suffix.
        RuntimeError: matplotlib is missing.
    """
    file, suffixes = pathlib.Path(path), _figure().canvas.get_supported_filetypes()
    is_writable = os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()
    if not is_writable or (file.suffix and file.suffix[1:].lower() not in suffixes):
        raise ValueError(f"`--png`: expected a file like chart.png, in a folder that exists; got {file}")


def _figure(**size: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('drawing needs matplotlib: pip install "fp8jax[train]"') from None
    return Figure(**size)


def picture(rows: list[Row], path: str | os.PathLike[str]) -> None:
    """Draws the chart; a cell that differs from its declaration is red. Needs the `train` extra."""
    figure = _figure(figsize=(9, 0.4 * len(rows) + 1), dpi=150)
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(_title(rows), fontsize=10)
    drawn = axes.table(
        [list(map(row.shown, COLUMNS)) for row in rows],
        rowLabels=[row.recipe for row in rows],
        colLabels=list(HEADINGS.values()),
        cellColours=[[_color(row, column) for column in COLUMNS] for row in rows],
        loc="center",
        cellLoc="center",
    )
    drawn.scale(1, 1.4)
    figure.savefig(path, bbox_inches="tight")


def _color(row: Row, column: str) -> str:
    """Red for a difference, else blue, darker for fewer bits."""
    if column in row.differences:
        return "#e34948"
    bits = max(map(_bits, row.measured[column].formats.split(" + ")))
    return {8: "#9ec5f4", 16: "#cfe3fb"}.get(bits, "#ffffff")
