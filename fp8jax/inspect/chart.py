"""The precision chart, read back from compiled programs.

    rows = [measure(recipe) for recipe in PRESETS]      # one train step each, on several devices
    print(table(rows))

A recipe declares a format for each kind of tensor. `measure` compiles a data-parallel train step of two
layers and reads the formats of its GEMM operands, collectives and arrays; it takes nothing from the recipe.
For a GPU that is not here, GEMMs are read from the optimized program. A CPU computes FP8 GEMMs in a wider
format, so there GEMMs are read from the lowered program. So is what has a scale, for all devices: a tensor or
blocks of it, and the scales' format. A "history" is an array of amaxes in the scaling state. "residuals" are
the activations that a scanned layer saves for its backward, read from the jaxpr. "needs" is what a training
loop must have for the recipe: nothing, a state beside the parameters, or `fp8jax.value_and_grad`.
"""

import collections
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from fp8jax import adapters, backends, extras, gradients, optim, scaling
from fp8jax.dot import state_names
from fp8jax.inspect import program, targets
from fp8jax.inspect.step import training_step
from fp8jax.inspect.tables import align
from fp8jax.optim.first_state import ROOT
from fp8jax.optim.state import is_adam_state
from fp8jax.optim.step.codecs import name_of
from fp8jax.quantization import is_scaled
from fp8jax.recipe import PRESETS, Recipe
from fp8jax.rewrite.find import scan_parts
from fp8jax.variables import LOSS_SCALE, PARAMS, SCALING

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

WIDTH, TOKENS = 256, 128  # of the model, and per device
SHAPES = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
LAYERS, ROWS = 2, 3 * TOKENS  # of the model whose residuals are read: no kernel is as large as an activation

# Format -> dtypes, by XLA's names and numpy's. FP8 codes cross between devices as bytes.
_DTYPES = {
    "FP4": ("f4e2m1fn",),
    "FP8": ("f8e4m3fn", "f8e5m2", "u8", "uint8", "float8_e4m3fn", "float8_e5m2"),
    "FP16": ("f16", "float16"),
    "BF16": ("bf16", "bfloat16"),
    "FP32": ("f32", "float32"),
}
_FORMATS = {dtype: name for name, dtypes in _DTYPES.items() for dtype in dtypes}
_BITS = {"FP4": 4, "FP8": 8, "FP16": 16, "BF16": 16, "FP32": 32}
_NEEDS = ("nothing", "state", "value_and_grad")
_SCALE_FORMATS = {"f32": "FP32", "f8e8m0fnu": "E8M0", "f8e4m3fn": "E4M3"}


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


class Row(NamedTuple):
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
    has_state = recipe.is_quantized and bool(state_names(recipe))
    needs = _NEEDS[has_state if is_plain else 2]
    is_wide = recipe.is_quantized and recipe.override_linear_precision[2]
    operands = {activations, activations if is_wide else recipe.gemm}
    saved = {"none": operands, "fp8": {activations, recipe.gemm}}
    saved |= {"dots_fp8": {activations, "FP8"}, "dots_fp8_inputs": {"FP8"}}
    residuals = _mixed(saved.get(gradient_checkpointing, {activations}))
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
) -> Row:
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
    model = adapters.transform(_mlp, recipe)
    options: dict[str, Any] = {"target": target, "devices": devices}
    dtype = jnp.float32 if target is None else jnp.bfloat16
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    variables = jax.eval_shape(model.init, params, x)

    def loss_fn(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    step = training_step(loss_fn, variables, x, recipe=recipe, optimizer=optim.adamw, **options)
    lowered = targets.lower_for(step.function, *step.args, donate_argnums=(0, 1), **options)
    read = program.read(targets.compile(lowered, target))
    device = targets.mesh(target, devices).devices.flat[0]
    variables, state, _ = lowered.out_info
    _, grads, _ = jax.eval_shape(step.value_and_grad, step.args[0], *step.args[2:])
    moments = map(_of_arrays, optim.moments(state))
    [adam] = (node for node in jax.tree.leaves(state, is_leaf=is_adam_state) if is_adam_state(node))
    measured = {
        "gemm": _of_gemms(program.read_lowered(lowered) if device.platform == "cpu" else read.gemms),
        "scaling": _of_scales(gradients.value_and_grad(loss_fn), step.args[0], *step.args[2:]),
        "comm": _of_collectives(read.collectives, devices),
        "weight": _of_arrays(variables[PARAMS]),
        "master_weight": _of_arrays(adam.master),
        "weight_grad": _of_arrays(grads),
        "moments": tuple(" + ".join(parts) for parts in zip(*moments, strict=True)),
        "rounding": _of_rounding(model, recipe),
        "residuals": _of_residuals(recipe, dtype, gradient_checkpointing),
        "needs": _of_needs(step.args[0], grads),
    }
    activations = _format(jnp.dtype(dtype).name)
    declared = declare(
        recipe, devices, activations=activations, gradient_checkpointing=gradient_checkpointing
    )
    cells = {column: Cell(declared[column], *measured[column]) for column in COLUMNS}
    names = dict.fromkeys(row.backend for row in model.report(params, x).rows if row.fp8)
    return Row(str(recipe), f"{devices} x {target or device.device_kind}", cells, ", ".join(names) or "-")


def _mlp(params: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ params["up"].astype(x.dtype)) @ params["down"].astype(x.dtype)


# Each of these returns the formats that it finds, and the evidence.


def _of_gemms(gemms: Sequence[program.Gemm]) -> tuple[str, str]:
    """The wider operand's format of each GEMM."""
    wider = [max(_format(gemm.lhs), _format(gemm.rhs), key=_bits) for gemm in gemms]
    return _mixed(wider), _counted(f"{gemm.lhs} x {gemm.rhs} {gemm.kind}" for gemm in gemms)


def _of_scales(value_and_grad: Any, variables: Any, *inputs: Any) -> tuple[str, str]:
    """The parts of GEMM operands that have a scale, in a CPU's program, and ", history" or ""."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (variables, *inputs))
    lowered = jax.jit(value_and_grad).trace(*shapes).lower(lowering_platforms=("cpu",))
    gemms = [gemm for gemm in program.read_lowered(lowered) if gemm.is_fp8]
    found = [block for gemm in gemms for block in gemm.blocks or ("tensor",)]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(variables.get(SCALING, {}))]
    history = ", history" if any("amax_history" in path for path in paths) else ""
    names = [re.sub(r"\w+$", lambda dtype: _SCALE_FORMATS.get(dtype[0], dtype[0]), block) for block in found]
    return _mixed(name + history * (name == "tensor") for name in names), _counted(found)


def _of_collectives(collectives: Sequence[program.Collective], devices: int) -> tuple[str, str]:
    """The formats of collectives with the size of a kernel or of one device's shard of a kernel."""
    found = [each for each in collectives if each.dtype in _FORMATS]
    large = [each for each in found if each.numbers >= 4 * WIDTH * WIDTH // devices]
    small = sum(each.numbers for each in found) - sum(each.numbers for each in large)
    shown = _counted(f"{each.kind} {each.dtype}[{each.numbers}]" for each in large)
    return _mixed(_format(each.dtype) for each in large), f"{shown}; {small} numbers in smaller ones"


def _of_arrays(tree: Any) -> tuple[str, str]:
    """The formats of arrays or `ScaledArray`s."""
    found = [
        (str(leaf.data.dtype), " with scale") if is_scaled(leaf) else (str(leaf.dtype), "")
        for leaf in jax.tree.leaves(tree, is_leaf=is_scaled)
    ]
    return _mixed(_format(dtype) for dtype, _ in found), _counted(map("".join, found))


def _of_rounding(model: Any, recipe: Recipe) -> tuple[str, str]:
    """How a step on this machine rounds: what depends on the optimizer's seed is rounded stochastically."""
    params = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in SHAPES.items()}
    variables = model.init(params, jnp.zeros((1, WIDTH)))
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), variables[PARAMS], is_leaf=is_scaled)

    def step(seed: int) -> tuple[Any, Any]:
        tx = optim.adamw(1e-3, recipe, seed=seed)
        updates, state = tx.update(grads, tx.init(variables), variables)
        return gradients.apply_updates(variables, updates)[PARAMS], state

    (weights, state), (other_weights, other) = step(0), step(1)
    mu, nu = optim.moments(state)
    of_mu = "nearest" if _same(mu, optim.moments(other)[0]) else "stochastic"
    of_weight = "nearest" if _same((weights, state.master), (other_weights, other.master)) else "stochastic"
    is_root = all(name_of(node).startswith(ROOT) for node in nu.values())
    formats = (
        of_mu,
        "kahan" if jax.tree.leaves(state.remainder) else of_weight,
        "root" if is_root else "value",
    )
    return " + ".join(formats), "two steps with different seeds"


def _of_residuals(recipe: Recipe, dtype: Any, gradient_checkpointing: str) -> tuple[str, str]:
    """The activations that the forward's scan returns beside its carry, without scales and kernels."""

    def stack(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (_mlp(layer, x), None), x, params)[0]

    model = adapters.transform(stack, recipe, gradient_checkpointing=gradient_checkpointing)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    params = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in SHAPES.items()}
    variables = jax.eval_shape(model.init, params, x)
    loss_fn = lambda variables, x: jnp.mean(model.apply(variables, x).astype(jnp.float32))  # noqa: E731
    jaxpr = jax.make_jaxpr(gradients.value_and_grad(loss_fn))(variables, x)
    forward = next(_scans(jaxpr.jaxpr))
    _, carry, _ = scan_parts(forward, forward.invars)
    saved = [variable.aval for variable in forward.outvars[len(carry) :]]
    entries = {ROWS * WIDTH: "", 4 * ROWS * WIDTH: ""}
    # Two FP4 codes are a byte.
    entries |= {numbers // 2: "FP4" for numbers in entries}
    found = [(entries[size], aval) for aval in saved if (size := aval.size // LAYERS) in entries]
    shown = _counted(f"{aval.dtype}{list(aval.shape[1:])}" for _, aval in found)
    bytes_saved = sum(aval.size * aval.dtype.itemsize for _, aval in found)
    names = (name or _format(str(aval.dtype)) for name, aval in found)
    return _mixed(names), f"{shown}; {bytes_saved / LAYERS / ROWS / WIDTH:.1f} bytes for each input"


def _scans(jaxpr: Any) -> Iterator[Any]:
    """The scans of a jaxpr, in their order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            for inner in jex.jaxprs_in_params(equation.params):
                yield from _scans(inner)


def _of_needs(variables: Any, grads: Any) -> tuple[str, str]:
    """The needs of a training loop with these variables and gradients, and its states as evidence."""
    states = {name: tree for name, tree in variables.items() if name != PARAMS}
    leaves = jax.tree.leaves((variables[PARAMS], grads), is_leaf=is_scaled)
    is_plain = LOSS_SCALE not in states and not any(map(is_scaled, leaves))
    return _NEEDS[bool(states) if is_plain else 2], f"states: {', '.join(states) or 'none'}"


def _same(tree: Any, other: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(jnp.array_equal, tree, other)))


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
    lines = [[row.recipe, *map(str, row.cells.values()), row.backend] for row in rows]
    return align([["recipe", *HEADINGS.values(), "backend"], *lines])


def text(rows: list[Row], *, evidence: bool = False) -> str:
    """The chart, and on demand the arrays and operations behind each cell."""
    lines = [table(rows), "", _title(rows)]
    for row in rows if evidence else ():
        lines.append(row.recipe)
        for heading, cell in zip(HEADINGS.values(), row.cells.values(), strict=True):
            lines.append(f"  {heading:16} {cell.formats:12} {cell.evidence}")
    return "\n".join(lines)


def _title(rows: list[Row]) -> str:
    where = f"read from a train step compiled for {rows[0].devices}"
    return f"{where}; residuals from the jaxpr of scanned layers"


def as_data(rows: list[Row]) -> list[dict[str, Any]]:
    """The chart for JSON."""
    return [
        {"recipe": row.recipe, "backend": row.backend}
        | {column: cell._asdict() for column, cell in row.cells.items()}
        for row in rows
    ]


def check_picture(path: str | os.PathLike[str], option: str = "--png") -> None:
    """Checks that a picture can be written to the path that `option` gave, before any program is compiled.

    Raises:
        ValueError: the path is no writable file, or matplotlib does not know its suffix.
        RuntimeError: matplotlib is missing.
    """
    file, suffixes = pathlib.Path(path), new_figure().canvas.get_supported_filetypes()
    is_writable = os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()
    if not is_writable or (file.suffix and file.suffix[1:].lower() not in suffixes):
        raise ValueError(f"`{option}`: expected a file like chart.png, in a folder that exists; got {file}")


def new_figure(**size: Any) -> Any:
    """A figure of matplotlib; RuntimeError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError(f"drawing needs matplotlib: {extras.install('train')}") from None
    return Figure(**size)


def picture(rows: list[Row], path: str | os.PathLike[str]) -> None:
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
    bits = max(map(_bits, cell.formats.split(" + ")))
    return {8: "#9ec5f4", 16: "#cfe3fb"}.get(bits, "#ffffff")
