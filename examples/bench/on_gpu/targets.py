"""What a GPU has to show, and what it did: one line a target.

lines(figures, why)      # figures by name, and per section why there are none
"""

from typing import Any, NamedTuple


class Target(NamedTuple):
    """A figure that is judged."""

    what: str
    section: str
    figure: str
    at_least: float | None = None
    at_most: float | None = None


TARGETS = (
    Target("correctness: rows that did not hold", "correctness", "correctness", at_most=0),
    Target("FP8 GEMMs of a Dense step (cuBLASLt calls)", "correctness", "FP8 GEMMs of a Dense step", 3, 3),
    Target("FP8 GEMM 8192^3, speed / torch._scaled_mm", "gemm", "gemm", at_least=0.9),
    Target("transformer layer, te, speed / bf16", "layer", "layer delayed", at_least=1.7),
    Target("transformer layer, te,scaling=current, speed / bf16", "layer", "layer current", at_least=1.6),
    Target("transformer layer, slower of the two, speed / flax", "layer", "layer, flax /", at_least=1.0),
    Target("optimizer step, O2, time / float32 optax.adamw", "optimizer", "optimizer", at_most=0.6),
    Target("GPT-350M train step, O2, tokens/s / bf16", "GPT-350M", "train step speed", at_least=1.25),
    Target("GPT-350M train step, O2, peak memory / bf16", "GPT-350M", "train step memory", at_most=0.7),
    Target("GPT-124M, validation loss, O2 - bf16", "convergence", "convergence", at_most=0.01),
)


def lines(figures: dict[str, float], why: dict[str, str], is_judged: bool = True) -> list[dict[str, Any]]:
    """One row a target.

    Args:
        figures: what was measured, by name.
        why: by section, why a figure of it may be missing.
        is_judged: whether the figures are a GPU's at full size; else nothing is held or missed.
    """
    rows = []
    for target in TARGETS:
        measured = figures.get(target.figure)
        if measured is None:
            verdict = f"not run: {why.get(target.section, 'the section was left out')}"
        elif not is_judged:
            verdict = "not judged: a dry run"
        else:
            verdict = "held" if is_held(target, measured) else "missed"
        rows.append({"target": target.what, "bound": bound(target), "measured": measured, "verdict": verdict})
    return rows


def is_held(target: Target, measured: float) -> bool:
    """Whether the figure is within the target's bounds."""
    low, high = target.at_least, target.at_most
    return (low is None or measured >= low) and (high is None or measured <= high)


def bound(target: Target) -> str:
    """The bounds in words."""
    low, high = target.at_least, target.at_most
    if low == high:
        return f"{low:g}"
    return f">= {low:g}" if low is not None else f"<= {high:g}"
