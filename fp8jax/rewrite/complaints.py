"""Errors and warnings of a transformed function."""

import warnings
from typing import Any

import jax

from fp8jax.quantization import is_scaled
from fp8jax.rewrite.report import Report

# Warn if a smaller share of the FLOPs is in FP8.
LOW_SHARE = 0.5


def no_array(params: Any) -> TypeError:
    """The error for a function in the tree of parameters, as in an Equinox module."""
    pairs, _ = jax.tree.flatten_with_path(params, is_leaf=is_scaled)
    kind, at = next((type(x).__name__, jax.tree_util.keystr(path)) for path, x in pairs if callable(x))
    return TypeError(
        f"`params`: expected a tree of arrays; got a {kind} at {at}. Give the arrays alone, of an Equinox "
        "module `params, static = eqx.partition(module, eqx.is_array)`, and combine them in the function."
    )


def check_like(like: Any) -> None:
    """Raises ValueError if `like` has shapes in place of arrays, because its scaling state is reused."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like)):
        raise ValueError(
            "`like`: expected the variables that `model.init` gives; got shapes of them. Their first scaling "
            "state is taken over, so call `model.init` itself."
        )


def check_share(report: Report) -> None:
    """Raises ValueError if nothing runs in FP8; warns if the share of FLOPs is below `LOW_SHARE`."""
    if report.flops == 0 or not any(row.fp8 for row in report.rows):
        reasons = (
            "; ".join(f"{row.path}: {row.reason}" for row in report.largest(3))
            or "it has no dot product of a parameter"
        )
        raise ValueError(
            f"`model`: expected a dot product that can run in FP8; got none ({reasons}). Give a rule for "
            'those that shall, `rules=[fp8jax.Rule("PATH", "te")]`, or use the recipe bf16.'
        )
    if report.fp8_share < LOW_SHARE:
        left = ", ".join(f"{row.path} ({row.reason})" for row in report.largest(3))
        warnings.warn(
            f"{100 * report.fp8_share:.0f}% of the FLOPs of dot products run in FP8; the largest others are: "
            f"{left or 'dot products of activations'}.",
            stacklevel=4,
        )
