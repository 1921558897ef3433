"""Estimates of `fp8jax.inspect.estimate` as tables, JSON and a picture.

    print(text([estimate(subject("layer"), recipe, target="h200") for recipe in ("bf16", "te")]))

The first estimate is the one that the others are compared with.
"""

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8jax.inspect import targets
from fp8jax.inspect.chart import new_figure
from fp8jax.inspect.estimate.time import BEST, GRADIENTS, LIKELY, PARTS, WORST, Cost, Estimate
from fp8jax.inspect.tables import records


def summary(rows: Sequence[Estimate]) -> list[dict[str, Any]]:
    """A row for each estimate: milliseconds, parts, and the speed-up over the first estimate, of a step and
    of its gradients with the loss."""
    return [
        {
            "estimated ms": row.recipe,
            "step": row.seconds() * 1e3,
            "from": row.seconds(BEST) * 1e3,
            "to": row.seconds(WORST) * 1e3,
            f"x {rows[0].recipe}": _bounded(row.speedup(rows[0])),
            "gradients": row.seconds(parts=GRADIENTS) * 1e3,
            f"x {rows[0].recipe} ": _bounded(row.speedup(rows[0], GRADIENTS)),
            **{part: row.seconds(parts=[part]) * 1e3 for part in PARTS},
        }
        for row in rows
    ]


def as_data(rows: Sequence[Estimate]) -> list[dict[str, Any]]:
    """The estimates for JSON, in seconds. Speed-ups over the first estimate are: likely, least, most."""
    return [
        {
            "recipe": row.recipe,
            "is_estimate": True,
            "seconds": [row.seconds(at) for at in (LIKELY, BEST, WORST)],
            "speedup": row.speedup(rows[0]),
            "speedup_of_gradients": row.speedup(rows[0], GRADIENTS),
            "parts": {part: row.seconds(parts=[part]) for part in PARTS},
            "layers": layers(row),
        }
        for row in rows
    ]


def layers(row: Estimate) -> list[dict[str, Any]]:
    """Milliseconds of each layer by part, and what limits its kernels: shares of its time."""
    groups: dict[str, list[Cost]] = collections.defaultdict(list)
    for cost in row.costs:
        groups[cost.layer or f"({cost.part})"].append(cost)
    return [
        {f"{row.recipe}, estimated ms": layer}
        | {part: sum(c.seconds(LIKELY) for c in costs if c.part == part) * 1e3 for part in PARTS}
        | {"limited by": _limits(costs)}
        for layer, costs in sorted(groups.items(), key=lambda pair: pair[0].startswith("("))
    ]


def _limits(costs: Sequence[Cost]) -> str:
    shares = collections.defaultdict[str, float](float)
    for cost in costs:
        times = cost.times(LIKELY)
        shares[max(times, key=times.__getitem__)] += cost.seconds(LIKELY)
    total = sum(shares.values())
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ordered if seconds > 0.005 * total)


def _bounded(found: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*found)


def text(rows: Sequence[Estimate]) -> str:
    """Both tables, under a heading."""
    heading = (
        f"ESTIMATED for {rows[0].devices} x {targets.get(rows[0].target).device}, not measured; "
        "docs/guides/time.md holds estimates against an H100 and an H200"
    )
    return "\n\n".join([heading, records(summary(rows)), *(records(layers(row)) for row in rows)])


def widths_text(by_width: Mapping[int, Sequence[Estimate]]) -> str:
    """The speed-up of a step by width, and the least width at which each recipe is estimated to pay.

    Args:
        by_width: width -> estimates of the same recipes, the first of which is compared with.
    """
    found = {width: [row.speedup(rows[0]) for row in rows[1:]] for width, rows in sorted(by_width.items())}
    first, *others = (row.recipe for row in next(iter(by_width.values())))
    table = [
        {"width": width} | dict(zip(others, map(_bounded, speedups), strict=True))
        for width, speedups in found.items()
    ]

    def least(pays: Callable[[tuple[float, float, float]], bool], number: int) -> str:
        return str(
            next((width for width, speedups in found.items() if pays(speedups[number])), "none of these")
        )

    lines = [
        f"{recipe}: estimated to pay from width {least(lambda s: s[0] > 1, n)}, by the lower bound from "
        f"{least(lambda s: s[1] > 1, n)}"
        for n, recipe in enumerate(others)
    ]
    return "\n".join([f"ESTIMATED step, x {first}", "", records(table), "", *lines])


def picture(rows: Sequence[Estimate], path: str | os.PathLike[str]) -> None:
    """Draws where the estimated time of a step goes: a bar for each estimate. Needs the `train` extra."""
    figure = new_figure(figsize=(8, 0.5 * len(rows) + 1.5), dpi=150, layout="constrained")
    axes, names = figure.subplots(), [row.recipe for row in rows]
    left = [0.0] * len(rows)
    for part, color in zip(PARTS, ("#00798c", "#d1495b", "#b8b8b8", "#edae49", "#30638e"), strict=True):
        values = [row.seconds(parts=[part]) * 1e3 for row in rows]
        axes.barh(names, values, left=left, label=part, color=color)
        left = [start + value for start, value in zip(left, values, strict=True)]
    spans = [
        [abs(row.seconds(at) * 1e3 - end) for row, end in zip(rows, left, strict=True)]
        for at in (BEST, WORST)
    ]
    axes.errorbar(left, names, xerr=spans, fmt="none", ecolor="black", capsize=3, linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("estimated ms of a step, with bounds")
    axes.set_title(f"estimate for {rows[0].devices} x {targets.get(rows[0].target).device}", fontsize=10)
    figure.legend(frameon=False, fontsize=8, ncols=len(PARTS), loc="outside lower center")
    figure.savefig(path)
