"""Does the program do what the report says? The GEMMs of a gradient step, layer by layer.

    rows = check(subject("gpt-125m"), "O2", target="h200")
    print(table(rows))
    [row.complaint for row in rows if row.complaint]     # "dgrad is a bf16 GEMM: ..."

A layer that the report lists in FP8 has up to three kinds of GEMMs: fprop, dgrad and wgrad. Which of them
a step needs is what JAX gives to XLA: the first layer has no dgrad, a frozen kernel no wgrad, and under
rematerialization there may be two of a kind. All of these must be FP8 in what JAX gives, but for those
that `override_linear_precision` takes out, and they must still be after XLA compiled it for a GPU: that
XLA makes a bf16 product of one is no error to it. A CPU multiplies FP8 in a wider format, exactly, so
there the program is read as XLA is given it.
"""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax import adapters, gradients
from fp8jax.adapters import linen, nnx
from fp8jax.dot import GEMMS
from fp8jax.inspect import models, program, targets
from fp8jax.inspect.memory.subject import Subject, mean_square
from fp8jax.inspect.program import Gemm
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import Report, layer_of
from fp8jax.rewrite.rules import Rules

NO_LAYER = "(no layer's)"

FIRST_WITH_FP8 = (8, 9)  # compute capability of the first GPUs that multiply FP8


class Row(NamedTuple):
    """One layer, and its GEMMs in the program."""

    layer: str  # its path, or `NO_LAYER`
    report: str  # "FP8", or why not
    fp8: int  # GEMMs in FP8
    others: int
    runs: int  # how often each of them runs in a step: the length of the scan around them; 1 where unknown
    complaint: str  # in what the program is not as reported, and the likely cause; "" if it is


def check(
    subject: Subject | tuple[Any, ...], recipe: Recipe | str, *, target: str | targets.Target | None = None
) -> list[Row]:
    """Compiles loss and gradients of a model and compares their GEMMs with the report.

    Args:
        subject: a `fp8jax.inspect.memory.subject.Subject`, (model, inputs) or (model, inputs, loss): a Flax
            module, Linen or NNX, plain or transformed; a tuple of arrays or `jax.ShapeDtypeStruct`s; and
            `loss(outputs, *inputs)`, by default the mean of the outputs' squares.
        recipe: a `Recipe`, or the text of one; of a transformed model, its own counts.
        target: a GPU that is not here; None for this machine's devices.

    Returns:
        A row for each layer with a product, and one for products that are no layer's.

    Raises:
        TypeError: the model is no Flax module.
        ValueError: the recipe cannot be parsed, or no such target.
        RuntimeError: the packages that compile for a target are missing.
    """
    model, inputs, *loss = subject
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    loss_fn, variables, report, wide = _prepared(model, recipe, inputs, loss[0] if loss else mean_square)

    def step(variables: Any, *inputs: Any) -> Any:
        return gradients.value_and_grad(loss_fn)(variables, *inputs)

    if target is not None:
        lowered = targets.lower_for(step, variables, *inputs, target=target)
        compiled = lowered.compile(compiler_options=targets.COMPILER_OPTIONS)
        capability = targets.get(target).capability
    else:
        lowered = jax.jit(step).lower(variables, *inputs)
        compiled = None if jax.devices()[0].platform == "cpu" else lowered.compile()
        capability = capability_of(jax.devices()[0])
    given = program.read_lowered(lowered)
    return _compared(report, wide, given, compiled and program.read(compiled).gemms, capability)


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability of a device of NVIDIA's, None of any other."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _prepared(
    model: Any, recipe: Recipe | str, inputs: tuple[Any, ...], loss: Callable[..., Any]
) -> tuple[Callable[..., Any], Any, Report, set[str]]:
    """The loss as a function of variables and inputs, the shapes of the variables, the report, and which of
    `GEMMS` recipes leave in a wider format."""
    if linen.is_module(model):
        model = adapters.transform(model, recipe)
    if isinstance(model, linen.LinenModel):
        loss_fn = lambda variables, *inputs: loss(model.apply(variables, *inputs), *inputs)  # noqa: E731
        variables = jax.eval_shape(
            lambda: model.init(jax.random.key(0), *(jnp.zeros(x.shape, x.dtype) for x in inputs))
        )
        rules = Rules(model.recipe, model.rules)
        return loss_fn, variables, model.report(*inputs), _wide([model.recipe, *rules.recipes])
    if nnx.is_module(model):
        transformed = model if nnx.recipes(model) else models.under(model, Recipe.parse(recipe))
        loss_fn, variables = models.loss_of_transformed(transformed, loss)
        return loss_fn, variables, adapters.report(transformed, *inputs), _wide(nnx.recipes(transformed))
    raise TypeError(f"`model`: expected a Flax module, Linen or NNX; got {type(model).__name__}.")


def _wide(recipes: Iterable[Recipe]) -> set[str]:
    of_all = (zip(GEMMS, recipe.override_linear_precision, strict=True) for recipe in recipes)
    return {name for pairs in of_all for name, is_wide in pairs if is_wide}


def _compared(
    report: Report,
    wide: set[str],
    given: Sequence[Gemm],
    compiled: Sequence[Gemm] | None,
    capability: tuple[int, int] | None,
) -> list[Row]:
    """The rows: `given` is what JAX gives to XLA, `compiled` what became of it, None on a CPU."""
    told = {row.path.replace("/", "."): row for row in report.rows}

    def by_layer(gemms: Sequence[Gemm]) -> dict[str | None, list[Gemm]]:
        groups = collections.defaultdict(list)
        for gemm in gemms:
            layer = layer_of(gemm.name)
            groups[layer if layer in told else None].append(gemm)
        return groups

    before, after = by_layer(given), by_layer(given if compiled is None else compiled)
    rows = []
    for key in (*told, None):
        row, narrow = told.get(key) if key is not None else None, [g for g in after[key] if g.is_fp8]
        if not before[key] and not after[key] and not (row and row.fp8):
            continue
        if row is None or row.fp8:
            is_layers = row is not None and row.fp8
            complaint = _complaint(before[key], after[key], wide, capability, is_layers)
        else:
            complaint = f"{len(narrow)} GEMMs are FP8, and the report says no" if narrow else ""
        says = "" if row is None else "FP8" if row.fp8 else row.reason
        runs = max((gemm.runs for gemm in narrow or after[key]), default=1)
        layer = NO_LAYER if row is None else row.path or "(root)"
        rows.append(Row(layer, says, len(narrow), len(after[key]) - len(narrow), runs, complaint))
    return rows


def _complaint(
    given: list[Gemm],
    found: list[Gemm],
    wide: set[str],
    capability: tuple[int, int] | None,
    is_layers: bool,
) -> str:
    """What is not FP8 although it should be, and why; "" if nothing is."""
    if not given and not found:
        if not is_layers:
            return ""
        return (
            "none of its products is in the program: does the loss use it, and is the backend one of XLA's?"
        )
    # What is no layer's may be anything, but what fp8jax multiplies has one of its names.
    allowed = [g for g in given if not g.is_fp8 and (_role(g) in wide or not (is_layers or _role(g)))]
    own = [gemm for gemm in given if not gemm.is_fp8 and gemm not in allowed]
    if own:
        named = " and ".join(dict.fromkeys(_role(gemm) or "a product" for gemm in own))
        return f"{named}: JAX gives XLA {own[0].lhs} x {own[0].rhs} to multiply, not FP8"
    others = [gemm for gemm in found if not gemm.is_fp8]
    expected = dict.fromkeys(_role(gemm) for gemm in given if gemm.is_fp8)
    have = [gemm for gemm in found if gemm.is_fp8]
    # Without names there is the number: XLA may join two GEMMs that are the same, but not of two kinds.
    if len(others) <= len(allowed) and len(have) >= len(expected):
        return ""
    seen = {_role(gemm) for gemm in have}
    lost = [gemm for gemm in given if gemm.is_fp8 and _role(gemm) not in seen]
    named = " and ".join(dict.fromkeys(_role(gemm) or "a product" for gemm in lost)) or "a product"
    fallen = [gemm for gemm in others if _role(gemm) not in wide]
    shown = "computed without a GEMM of its own, or one that is not FP8"
    if fallen:
        shown = f"a {fallen[0].kind} GEMM of {fallen[0].lhs} x {fallen[0].rhs}, not FP8"
    return f"{named}: {shown}; {_cause(lost, fallen, capability)}"


def _role(gemm: Gemm) -> str:
    """Which of `GEMMS` it is by its name; "" where the name does not say."""
    return next((part for part in reversed(gemm.name.split("/")) if part in GEMMS), "")


def _cause(lost: list[Gemm], fallen: list[Gemm], capability: tuple[int, int] | None) -> str:
    """The likely cause why XLA multiplies `lost` as `fallen`, which are not FP8."""
    if capability is not None and capability < FIRST_WITH_FP8:
        has = ".".join(map(str, capability))
        return f"compute capability {has} has no FP8 GEMMs, which begin at 8.9"
    if any(gemm.lhs == gemm.rhs == "f8e5m2" for gemm in lost):
        return "cuBLASLt has no product of E5M2 with E5M2"
    if any(len(gemm.out_shape) > 2 for gemm in lost):
        return (
            "it is a batch of products with a scale each, as under vmap: cuBLASLt takes one scale an operand"
        )
    if any(1 in gemm.out_shape for gemm in lost):
        return "one of its dimensions is 1, and XLA does not take a GEMM for a vector"
    size = max((math.prod(gemm.out_shape) for gemm in lost), default=0)
    if not fallen or any(math.prod(gemm.out_shape) > size for gemm in fallen):
        return (
            "XLA joined it with others of the same operand: XLA_FLAGS=--xla_gpu_dot_merger_threshold_mb=0 "
            "keeps them apart"
        )
    return "XLA did not find its pattern, codes times one scalar, multiplied at once: is a scale no scalar?"


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    cells = [("layer", "report", "FP8 GEMMs", "other GEMMs", "runs")]
    cells += [(row.layer, row.report, str(row.fp8), str(row.others), str(row.runs)) for row in rows]
    if all(row.runs == 1 for row in rows):
        cells = [line[:-1] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def verdict(rows: Sequence[Row]) -> str:
    """Whether the program is as reported; a line for each layer where it is not."""
    narrow = [row for row in rows if row.report == "FP8"]
    if not any(row.complaint for row in rows):
        if not narrow:
            return "as reported: no layer is to be in FP8"
        count = sum(row.fp8 for row in narrow)
        return f"as reported: {count} FP8 GEMMs in the {len(narrow)} layers that are to be in FP8"
    lines = [f"{row.layer}: {row.complaint}" for row in rows if row.complaint]
    return "\n".join(["NOT as reported:", *lines])


def text(rows: Sequence[Row], recipe: Recipe | str, target: str | None = None) -> str:
    """The rows under a heading, and the verdict."""
    device = jax.devices()[0]
    where = f"compiled for {targets.get(target).device}" if target else f"compiled for {device.device_kind}"
    if target is None and device.platform == "cpu":
        where = "as XLA is given it: a CPU multiplies FP8 in a wider format, exactly"
    return f"{recipe}, {where}\n\n{table(rows)}\n\n{verdict(rows)}"


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for JSON."""
    return [row._asdict() for row in rows]
