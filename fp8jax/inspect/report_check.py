"""A check of the report: the GEMMs of a gradient step, layer by layer, next to what the report says of them.

    rows = check(subject("gpt-125m"), "O2", target="h200")
    print(table(rows))
    [row.complaint for row in rows if row.complaint]     # "dgrad: a cublaslt GEMM of bf16 x bf16, ..."

A layer that the report lists in FP8 has up to three kinds of GEMMs: fprop, dgrad and wgrad. The lowered
program says which of them the step needs: the first layer has no dgrad, a frozen kernel no wgrad, and remat
may repeat a GEMM. All of them must be FP8 in the lowered program, except those in
`override_linear_precision`. They must stay FP8 when XLA compiles it for a GPU: XLA replaces an FP8 GEMM by a
bf16 GEMM without a warning. A CPU computes FP8 GEMMs in a wider format, exactly, so there only the lowered
program is read.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fp8jax import gradients
from fp8jax.adapters.adapter import adapter_of
from fp8jax.backends import BACKENDS, FIRST_WITH_FP8
from fp8jax.dot import GEMMS
from fp8jax.inspect import program, targets
from fp8jax.inspect.program import Gemm
from fp8jax.inspect.subject import Subject, loss_of, report_of, transformed
from fp8jax.inspect.tables import align
from fp8jax.platforms import capability_of
from fp8jax.recipe import Recipe
from fp8jax.rewrite.report import LayerRow, Report, layer_of

NO_LAYER = "(no layer's)"


class GemmRow(NamedTuple):
    """One layer and its GEMMs in the program."""

    layer: str  # its path, or `NO_LAYER`
    report: str  # "FP8", or the reason why not
    fp8: int  # GEMMs in FP8
    others: int
    runs: int  # how often each GEMM runs in a step: the length of the scan around it; 1 where unknown
    complaint: str  # how the program differs from the report, with the likely cause; "" if it does not


def check(
    subject: Subject | tuple[Any, ...], recipe: Recipe | str, *, target: str | targets.Target | None = None
) -> list[GemmRow]:
    """Compares the program of a gradient step with the model's report.

    Args:
        subject: (model, inputs) or (model, inputs, loss): a model that `fp8jax.transform` takes or returns;
            the arguments of its report, arrays or `jax.ShapeDtypeStruct`s: its inputs, for a function of
            parameters `(params, *inputs)`; and `loss(outputs, *inputs)`, by default the mean square of the
            outputs. `subject("gpt-125m")` gives one.
        recipe: a `Recipe`, or the text of one; for a transformed model, its own.
        target: a GPU that is not here; None for this machine.

    Returns:
        A row for each layer with a GEMM, and a row for the GEMMs outside of layers.

    Raises:
        TypeError: see `fp8jax.transform`.
        ValueError: the recipe cannot be parsed, or is not the transformed model's; no such target.
        RuntimeError: the packages that compile for a target are missing.
    """
    model, inputs, *loss = subject
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    model = transformed(model, recipe)
    report = report_of(model, inputs)
    loss_fn, args = loss_of(model, inputs, *loss)
    step = gradients.value_and_grad(loss_fn)
    lowered = targets.lower_for(step, *args, target=target)
    gemms = compiled = program.read_lowered(lowered)
    if target is not None or jax.devices()[0].platform != "cpu":
        compiled = program.read(targets.compile(lowered, target)).gemms
        if any(row.fp8 and BACKENDS[row.backend].is_call_on_gpu for row in report.rows):
            lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cpu",))
            gemms = program.read_lowered(lowered)
    capability = capability_of(jax.devices()[0]) if target is None else targets.get(target).capability
    return _compared(report, _high_precision(model), gemms, compiled, capability)


def _high_precision(model: Any) -> set[str]:
    """The kinds of GEMMs that the model's recipes keep in high precision."""
    settings = adapter_of(model).settings
    recipes = [settings.recipe, *settings.new_rules().recipes]
    pairs = [pair for recipe in recipes for pair in zip(GEMMS, recipe.override_linear_precision, strict=True)]
    return {name for name, is_high in pairs if is_high}


def _compared(
    report: Report,
    high: set[str],  # the kinds of GEMMs in high precision
    lowered: Sequence[Gemm],
    compiled: Sequence[Gemm],  # on a CPU the lowered ones
    capability: tuple[int, int] | None,  # of the GPU; None on a CPU
) -> list[GemmRow]:
    """The rows, from a model's report and the GEMMs of its program."""
    reported: dict[str | None, LayerRow] = {row.path.replace("/", "."): row for row in report.rows}
    reported[None] = LayerRow(NO_LAYER, "", (), False, "")

    def by_layer(gemms: Sequence[Gemm]) -> dict[str | None, list[Gemm]]:
        groups = collections.defaultdict(list)
        for gemm in gemms:
            layer = layer_of(gemm.name)
            groups[layer if layer in reported else None].append(gemm)
        return groups

    before, after = by_layer(lowered), by_layer(compiled)
    rows = []
    for key, row in reported.items():
        fp8 = [gemm for gemm in after[key] if gemm.is_fp8]
        if not (before[key] or after[key] or row.fp8):
            continue
        if row.fp8 or key is None:
            complaint = _complaint(before[key], after[key], high, capability, row.fp8)
        else:
            complaint = f"{len(fp8)} GEMMs are FP8, and the report says no" if fp8 else ""
        reason = "FP8" if row.fp8 else row.reason
        runs = max((gemm.runs for gemm in fp8 or after[key]), default=1)
        rows.append(
            GemmRow(row.path or "(root)", reason, len(fp8), len(after[key]) - len(fp8), runs, complaint)
        )
    return rows


def _complaint(
    given: list[Gemm],
    found: list[Gemm],
    high: set[str],
    capability: tuple[int, int] | None,
    is_fp8_layer: bool,
) -> str:
    """The GEMMs that should be FP8 and are not, and the likely cause; "" if there are none."""
    if not given and not found and is_fp8_layer:
        return "none of its GEMMs is in the program: does the loss depend on it, and is the backend XLA?"
    # Outside of layers, only GEMMs of fp8jax, which have one of its names, must be FP8.
    allowed = [g for g in given if not g.is_fp8 and (_role(g) in high or not (is_fp8_layer or _role(g)))]
    wrong = [gemm for gemm in given if not gemm.is_fp8 and gemm not in allowed]
    if wrong:
        return f"{_named(wrong)}: JAX gives XLA a GEMM of {wrong[0].lhs} x {wrong[0].rhs}, not FP8"
    fp8, others = ([gemm for gemm in found if gemm.is_fp8 == is_fp8] for is_fp8 in (True, False))
    # By number, as names may be missing: XLA may join two equal GEMMs, but never GEMMs of two kinds.
    if len(others) <= len(allowed) and len(fp8) >= len({_role(gemm) for gemm in given if gemm.is_fp8}):
        return ""
    roles = {_role(gemm) for gemm in fp8}
    lost = [gemm for gemm in given if gemm.is_fp8 and _role(gemm) not in roles]
    replaced = [gemm for gemm in others if _role(gemm) not in high]
    shown = "computed without a GEMM of its own, or by one that is not FP8"
    if replaced:
        shown = f"a {replaced[0].kind} GEMM of {replaced[0].lhs} x {replaced[0].rhs}, not FP8"
    return f"{_named(lost)}: {shown}; {_cause(lost, replaced, capability)}"


def _role(gemm: Gemm) -> str:
    """Which of `GEMMS` it is, by its name; "" where the name does not say."""
    return next((part for part in reversed(gemm.name.split("/")) if part in GEMMS), "")


def _named(gemms: list[Gemm]) -> str:
    return " and ".join(dict.fromkeys(_role(gemm) or "a GEMM" for gemm in gemms)) or "a GEMM"


def _cause(lost: list[Gemm], replaced: list[Gemm], capability: tuple[int, int] | None) -> str:
    """The likely cause why XLA computes the FP8 GEMMs `lost` as `replaced`, which are not FP8."""
    if capability is not None and capability < FIRST_WITH_FP8:
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 GEMMs; they need 8.9"
    if any(gemm.blocks for gemm in lost):
        return "XLA dequantizes blocks where cuDNN has no GEMM for the GPU or the shapes"
    if any(gemm.lhs == gemm.rhs == "f8e5m2" for gemm in lost):
        return "cuBLASLt has no GEMM of E5M2 with E5M2"
    if any(len(gemm.out_shape) > 2 for gemm in lost):
        return "it is a batch of GEMMs with a scale each, as under vmap: cuBLASLt takes one scale per operand"
    if any(1 in gemm.out_shape for gemm in lost):
        return "one of its dimensions is 1, and XLA uses no GEMM for a vector"
    size = max((math.prod(gemm.out_shape) for gemm in lost), default=0)
    if not replaced or any(math.prod(gemm.out_shape) > size for gemm in replaced):
        return (
            "XLA joined it with others of the same operand: XLA_FLAGS=--xla_gpu_dot_merger_threshold_mb=0 "
            "keeps them apart"
        )
    return "XLA did not match its pattern of an FP8 GEMM, FP8 numbers times a scalar: is a scale no scalar?"


def table(rows: Sequence[GemmRow]) -> str:
    """The rows as text, with the column `runs` if there is a loop."""
    lines = [("layer", "report", "FP8 GEMMs", "other GEMMs", "runs")]
    lines += [(row.layer, row.report, str(row.fp8), str(row.others), str(row.runs)) for row in rows]
    has_loop = any(row.runs != 1 for row in rows)
    return align(line if has_loop else line[:-1] for line in lines)


def verdict(rows: Sequence[GemmRow]) -> str:
    """Whether the program is as reported, with a line for each layer that is not."""
    if lines := [f"{row.layer}: {row.complaint}" for row in rows if row.complaint]:
        return "\n".join(["NOT as reported:", *lines])
    counts = [row.fp8 for row in rows if row.report == "FP8"]
    if not counts:
        return "as reported: no layer is to be in FP8"
    return f"as reported: {sum(counts)} FP8 GEMMs in the {len(counts)} layers that are to be in FP8"


def text(rows: Sequence[GemmRow], recipe: Recipe | str, target: str | None = None) -> str:
    """The rows under a heading, and the verdict."""
    device = jax.devices()[0]
    where = f"compiled for {targets.get(target).device if target else device.device_kind}"
    if target is None and device.platform == "cpu":
        where = "before XLA optimizes it: a CPU computes FP8 GEMMs in a wider format, exactly"
    return f"{recipe}, {where}\n\n{table(rows)}\n\n{verdict(rows)}"
