"""The report: for each layer, whether it runs in FP8, and the reason if not."""

import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fp8jax import backends, scaling
from fp8jax.recipe import Recipe
from fp8jax.rewrite.interpreter.dots import OF_A_VECTOR, OF_CONSTANTS, OF_NO_INPUT, OF_ROWS, Dot
from fp8jax.rewrite.interpreter.find import FoundDots
from fp8jax.rewrite.patterns import layer_path
from fp8jax.rewrite.rules import BY_RULE, EXCLUDED, NOT_INCLUDED, OF_EMBEDDINGS, LayerChoice

# Warn if a smaller share of the FLOPs is in FP8.
LOW_SHARE = 0.5
# Packages whose frames no warning names.
_OURS = ("fp8jax", "flax", "jax")
# How the reasons begin of layers that are in high precision as expected.
_OF_CONVOLUTIONS = "convolutions stay as they are"
_EXPECTED = (BY_RULE, EXCLUDED, NOT_INCLUDED, OF_EMBEDDINGS, OF_NO_INPUT, OF_ROWS, _OF_CONVOLUTIONS)

# Prefix of a layer's named scope, see `scope`.
_SCOPE = "fp8jax:"


class LayerRow(NamedTuple):
    """One layer."""

    path: str  # as in "params", joined by "/"
    kind: str  # the layer's class
    kernel_shape: tuple[int, ...]  # shape in one layer of a scan; () without a kernel
    fp8: bool
    reason: str  # why the layer does not run in FP8; empty if it does
    flops: int = 0  # of its matmuls in one forward pass: two per multiplication
    lora: int = 0  # rank of its adapters; 0 without adapters
    # rows, inputs and outputs of its first matmul; of one block for experts
    gemm: tuple[int, int, int] | None = None
    scaling: str = ""  # of a layer in FP8
    backend: str = ""  # of the GEMMs of a layer in FP8
    operands: str = ""  # of the GEMMs of a layer in FP8: "FP8" or "FP4"
    plain: str = ""  # why the weight and gradient of a layer in FP8 are not in the recipe's formats


class Report(NamedTuple):
    """The layers of a model, in the order of their first call; `str` gives a table."""

    recipe: str
    rows: tuple[LayerRow, ...]
    flops: int  # of all matmuls in one forward pass, including those of activations
    note: str = ""

    @property
    def fp8_share(self) -> float:
        """The share of matmul FLOPs in FP8."""
        return sum(row.flops for row in self.rows if row.fp8) / max(self.flops, 1)

    def largest(self, count: int) -> list[LayerRow]:
        """The `count` layers with the most FLOPs that do not run in FP8."""
        rows = [row for row in self.rows if not row.fp8]
        return sorted(rows, key=lambda row: -row.flops)[:count]

    def __str__(self) -> str:
        def share(flops: int) -> str:
            return f"{100 * flops / max(self.flops, 1):.1f}%"

        cells = [("layer", "kind", "kernel", "FLOPs", "FP8")]
        for row in self.rows:
            shape = "x".join(map(str, row.kernel_shape))
            answer = row.reason or ("yes" if row.scaling in ("", Recipe.scaling) else f"yes, {row.scaling}")
            answer += f", but {row.plain}" if row.plain else ""
            answer += f", adapters of rank {row.lora}" if row.lora else ""
            cells.append((row.path or "(root)", row.kind, shape, share(row.flops), answer))
        others = self.flops - sum(row.flops for row in self.rows)
        if others > 0:
            cells.append(("(no layer's)", "", "", share(others), "matmuls of activations stay as they are"))
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in cells
        ]
        count = sum(row.fp8 for row in self.rows)
        formats = sorted({row.operands for row in self.rows if row.fp8})
        summary = f"{self.recipe}: {count} of {len(self.rows)} layers in {' and '.join(formats) or 'FP8'}, "
        summary += f"{100 * self.fp8_share:.0f}% of the FLOPs of matmuls"
        return "\n".join([summary, *lines, *([self.note] if self.note else [])])


def make_report(
    recipe: str,
    found: FoundDots,
    choices: list[tuple[Dot, LayerChoice]],
    modules: Mapping[str, Any],
    backend: str,
    notes: list[str],
) -> Report:
    """The report, with a row for each parameter of a dot product, gather or convolution.

    Args:
        recipe: the recipe's text.
        found: the dot products of the function.
        choices: the choice for every dot product of a parameter.
        modules: the function's modules by path.
        backend: the name of the backend, or "auto".
        notes: lines for the end.

    Raises:
        ValueError: the backend cannot compute one of the dot products in FP8 here.
    """

    def kind(path: tuple[str, ...] | None, default: str) -> str:
        module = modules.get("/".join(path[:-1])) if path is not None else None
        return default if module is None else type(module).__name__

    rows: dict[tuple[str, bool, str], LayerRow] = {}
    chosen: list[backends.ChosenBackend] = []
    own: dict[str, None] = {}  # lines of the scalings
    for path in sorted({*found.tables} - {dot.path for dot, _ in choices}):
        row = LayerRow(layer_path(path), kind(path, "gather"), (), False, OF_EMBEDDINGS)
        rows["/".join(path), False, ""] = row
    for dot, choice in choices:
        assert dot.path is not None
        key = ("/".join(dot.path), choice.reason is None, choice.reason or "")
        name = kind(dot.path, "ragged_dot" if dot.groups else "dot_general")
        row = LayerRow(dot.layer, name, dot.shape, *key[1:], gemm=dot.gemm)
        if choice.reason is None:
            method = scaling.of_recipe(choice.recipe)
            own[method.note] = None
            chosen.append(backends.choose(backend, method.granularity, is_batched=dot.is_batched))
            row = row._replace(
                scaling=choice.recipe.scaling,
                backend=chosen[-1].name,
                operands=choice.recipe.gemm,
                plain=choice.plain,
            )
        row = rows.get(key, row)
        rows[key] = row._replace(flops=row.flops + dot.flops)
    total = sum(dot.flops for dot in found.dots) + sum(found.convolutions.values())
    for (scope, path), flops in found.convolutions.items():
        name = scope if path is None else layer_path(path)
        row = LayerRow(name, kind(path, "conv"), (), False, _OF_CONVOLUTIONS, flops)
        rows[f"{scope} {name}", False, ""] = row
    if constant := sum(dot.flops for dot in found.dots if dot.reason == OF_CONSTANTS):
        rows["", False, ""] = LayerRow("(constants)", "dot_general", (), False, OF_CONSTANTS, constant)
    notes = [*backends.notes(chosen), *filter(None, [*own, *notes]), *_heads(found, choices)]
    return Report(recipe, tuple(rows.values()), total, "\n".join(notes))


def _heads(found: FoundDots, choices: list[tuple[Dot, LayerChoice]]) -> list[str]:
    """A line for each layer in FP8 that may be the output head: from an embedding's width to its rows, and no
    other layer takes its output. The recipe's `exclude` finds heads by their names alone."""
    inputs = {dot.gemm[1] for dot, _ in choices}
    sizes = {shape[::-1] for shape in found.tables.values() if shape[:1] and shape[0] not in inputs}
    heads = [dot.layer for dot, choice in choices if choice.reason is None and dot.gemm[1:] in sizes]
    return [
        f"{layer} may be the output head, which `exclude` finds by name: Rule({layer!r}) keeps it in bf16"
        for layer in dict.fromkeys(heads)
    ]


def check_share(report: Report) -> None:
    """Raises ValueError if nothing runs in FP8; warns if the share of FLOPs is below `LOW_SHARE`."""
    left = [f"{row.path} ({row.reason})" for row in report.largest(3)]
    has_fp8 = any(row.fp8 for row in report.rows)
    if has_fp8 and report.flops == 0:
        raise ValueError(
            "`model`: expected a dot product with numbers to multiply; all are empty, as for inputs without "
            "rows. Give other inputs."
        )
    if not has_fp8:
        raise ValueError(
            "`model`: expected a dot product that can run in FP8; got none "
            f"({', '.join(left) or 'it has no dot product of a parameter'}). Choose layers with a rule, "
            '`rules=[fp8jax.Rule("PATH", "te")]`, or use the recipe bf16.'
        )
    if report.fp8_share < LOW_SHARE:
        warnings.warn(
            f"{100 * report.fp8_share:.0f}% of the FLOPs of matmuls run in FP8; the largest others are: "
            f"{', '.join(left) or 'matmuls of activations'}.",
            stacklevel=_level(),
        )


def _level() -> int:
    """The `stacklevel` of the first caller outside of fp8jax, Flax and JAX, for the caller's warning."""
    folders = [
        os.path.join(os.path.dirname(str(module.__file__)), "")
        for module in map(sys.modules.get, _OURS)
        if module
    ]
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(tuple(folders)):
        level, frame = level + 1, frame.f_back
    return level


def warn_of_none(report: Report) -> None:
    """Warns if no matmul of a call runs in FP8, unless that is as expected: heads, embeddings, rules."""
    if any(row.fp8 for row in report.rows):
        return
    if left := [row for row in report.rows if row.flops and not row.reason.startswith(_EXPECTED)][:3]:
        layers = ", ".join(f"{row.path} ({row.reason})" for row in left)
        advice = " Give it batches, not single examples under a vmap." if OF_A_VECTOR in layers else ""
        warnings.warn(
            f"no matmul of this call of the model runs in FP8: {layers}.{advice}", stacklevel=_level()
        )


def scope(path: str) -> Any:
    """A named scope that assigns operations to the layer at `path`."""
    return jax.named_scope(_SCOPE + path.replace("/", "."))


def layer_of(name: str) -> str | None:
    """The layer of an operation, from the `scope` in the operation's name, with "." for "/" in its path; None
    without a layer."""
    found = re.findall(rf"{_SCOPE}([^/()]*)", name)
    return found[-1] if found else None
