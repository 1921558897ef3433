"""The pictures of a run as PNG: losses, scales, saturation."""

import io
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8jax.extras import need
from fp8jax.inspect.chart import new_figure
from fp8jax.train.metrics import OPERANDS, Curves, ScaledTensor

COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e")
GREY = "#7f7f7f"  # of text and axes: pages are light or dark
MOST_KINDS = 12  # of layers that have panels of scales
MOST_INCHES = 60  # of a map's height; PNG files have at most 2**16 pixels


def losses(curves: Mapping[str, Curves], label: str = "loss") -> bytes:
    """Training and validation loss of every model; with two models, their difference below.

    A skipped step has a mark at the lower edge.
    """
    names = list(curves)
    rows = 2 if len(names) == 2 else 1
    figure, axes = _subplots(
        rows, 1, size=(7, 4 + 1.4 * (rows - 1)), height_ratios=[3, 1][:rows], sharex=True
    )
    # The twin is drawn first, wide and pale, because the two curves should coincide.
    for number in reversed(range(len(names))):
        _draw_losses(axes[0][0], names[number], curves[names[number]], COLOURS[number], is_below=number > 0)
    axes[0][0].set_ylabel(label, parse_math=False)
    axes[0][0].legend(frameon=False, reverse=True)
    if rows == 2:
        _draw_difference(axes[1][0], curves)
    axes[-1][0].set_xlabel("step")
    return _png(figure)


def _draw_losses(panel: Any, name: str, curves: Curves, colour: str, is_below: bool) -> None:
    loss = np.array(curves.loss)
    steps = np.arange(1, len(loss) + 1)
    at, validation = zip(*curves.validation, strict=True) if curves.validation else ((), ())
    style = {"color": colour, "alpha": 0.35 if is_below else 1.0}
    panel.plot(steps, loss, color=colour, alpha=0.15, linewidth=0.7)
    panel.plot(at, validation, "o:", markersize=11 if is_below else 4, label=f"{name}, validation", **style)
    if curves.skipped:
        at_edge = {"transform": panel.get_xaxis_transform(), "clip_on": False, "linestyle": ""}
        heights = np.full(len(curves.skipped), 0.05 if is_below else 0.02)
        panel.plot(curves.skipped, heights, "|", markersize=9, label=f"{name}, skipped", **at_edge, **style)
    width = 6.0 if is_below else 1.5
    panel.plot(steps, _smooth(loss), linewidth=width, label=f"{name}, training (smoothed)", **style)


def _draw_difference(panel: Any, curves: Mapping[str, Curves]) -> None:
    """The first model's training loss minus the second's, at the steps that both did."""
    pairs = zip(*(of_one.loss for of_one in curves.values()), strict=False)
    difference = _smooth(np.array([first - second for first, second in pairs]))
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.plot(np.arange(1, len(difference) + 1), difference, color=COLOURS[0], linewidth=1.2)
    panel.set_ylabel("{} - {}\n(same batches)".format(*curves))
    # In the first tenth the loss falls steeply, which would set the range of the axis.
    late = difference[len(difference) // 10 :]
    limit = max(0.02, 1.3 * float(np.max(np.abs(late[np.isfinite(late)]), initial=0.0)))
    panel.set_ylim(-limit, limit)


def scales(tensors: list[ScaledTensor], curves: Curves) -> bytes:
    """One panel per kind of layer and operand; one line per layer, dark for the first, on a log2 axis.

    Layers whose paths differ in numbers only are of one kind: h_0/mlp and h_1/mlp.
    """
    colours, values = need("matplotlib").colormaps["viridis"], np.array(curves.scales)
    kinds = list(dict.fromkeys(map(_kind, tensors)))
    shown = kinds[:MOST_KINDS]
    size = (1.2 + 2.3 * len(shown), 6.6)
    figure, axes = _subplots(len(OPERANDS), len(shown), size=size, sharex=True, sharey="row")
    for (row, operand), (column, kind) in itertools.product(enumerate(OPERANDS), enumerate(shown)):
        panel = axes[row][column]
        lines = [i for i, tensor in enumerate(tensors) if (_kind(tensor), tensor.operand) == (kind, operand)]
        for depth, i in enumerate(lines):
            colour = colours(0.3 + 0.6 * depth / max(len(lines) - 1, 1))
            label = _number(tensors[i]) if depth % _every(len(lines), 24) == 0 else None
            panel.plot(curves.scale_steps, values[:, i], color=colour, linewidth=1.3, label=label)
        panel.set_yscale("log", base=2)
        panel.set_title("" if row else _short(kind), parse_math=False)
        panel.set(
            xlabel="step" if operand == OPERANDS[-1] else "",
            ylabel="" if column else f"scale of the\n{operand}",
        )
    handles, labels = axes[0][0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, title="layer", loc="outside right upper", frameon=False, fontsize=8)
    if len(kinds) > len(shown):
        figure.suptitle(f"the first {len(shown)} of {len(kinds)} kinds of layers", fontsize=10)
    return _png(figure)


def saturations(tensors: list[ScaledTensor], curves: Curves) -> bytes:
    """One map per operand: a row per layer, a column per span of steps, red where casts clipped."""
    values = np.array(curves.saturations)
    rows = [[i for i, t in enumerate(tensors) if t.operand == operand] for operand in OPERANDS]
    inches = min(0.2 * len(tensors), MOST_INCHES)
    figure, axes = _subplots(len(OPERANDS), 1, size=(8, 1.6 + inches), sharex=True)
    norm = need("matplotlib.colors").TwoSlopeNorm(1.0, 0.0, 2.0)
    edges, image = [0, *curves.scale_steps], None
    step = _every(len(tensors), MOST_INCHES / 0.2)
    for panel, operand, chosen in zip(axes[:, 0], OPERANDS, rows, strict=True):
        heights = np.arange(len(chosen) + 1)
        image = panel.pcolormesh(edges, heights, values[:, chosen].T, cmap="RdBu_r", norm=norm)
        labels = [f"{_short(tensors[i].layer)} {_number(tensors[i]) or ''}".strip() for i in chosen]
        panel.set_yticks(heights[:-1:step] + 0.5, labels[::step], parse_math=False)
        panel.tick_params(labelsize=9)
        panel.invert_yaxis()
        panel.set_title(operand, fontsize=10, loc="left")
        panel.grid(False)
    axes[-1][0].set_xlabel("step")
    bar = figure.colorbar(image, ax=list(axes[:, 0]), shrink=0.6, pad=0.02, extend="max")
    bar.set_label("amax / largest representable value\n(above 1: clipped)")
    bar.ax.tick_params(colors=GREY, which="both")
    return _png(figure)


def _every(count: int, most: float) -> int:
    """The smallest step with which at most `most` of `count` are shown."""
    return max(1, math.ceil(count / most))


def _kind(tensor: ScaledTensor) -> str:
    return re.sub(r"\d+", "*", tensor.layer)


def _number(tensor: ScaledTensor) -> str | None:
    """The numbers of a layer in its path and in a scan."""
    return " ".join([*re.findall(r"\d+", tensor.layer), tensor.number]).strip() or None


def _subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    figure = new_figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[:].set_color(GREY)
        panel.grid(True, color=GREY, alpha=0.2, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(colors=GREY, labelsize=8)
    return figure, axes


def _png(figure: Any) -> bytes:
    """A transparent picture with grey text, for light and dark pages."""
    for text in figure.findobj(need("matplotlib.text").Text):
        text.set_color(GREY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, transparent=True)
    return buffer.getvalue()


def _smooth(values: np.ndarray) -> np.ndarray:
    """The running mean of the finite values over a fiftieth of the curve; NaN where there are none."""
    if not len(values):  # which `np.convolve` refuses
        return values
    half, is_finite = max(1, len(values) // 100), np.isfinite(values)
    window = np.ones(2 * half + 1)
    sums, counts = (
        np.convolve(each, window)[half:-half] for each in (np.where(is_finite, values, 0.0), is_finite)
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _short(path: str) -> str:
    """`h/attn/c_attn` -> `attn/c_attn`."""
    return "/".join(path.split("/")[-2:])
