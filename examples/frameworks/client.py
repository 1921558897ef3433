"""Options, data and the result line of the programs in this folder.

Each program trains a small model by a framework's own loop: by the recipe, and by bf16 on the same data. It
prints one line of JSON, and fails if the last losses differ by more than 2% or if no matmul runs in FP8.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

VOCABULARY, LENGTH, BATCH, WIDTH = 64, 32, 16, 64
TOLERANCE = 0.02


class Trained(NamedTuple):
    """The last loss of a run, and the share of matmul FLOPs in FP8 by the report."""

    loss: float
    fp8_share: float


OPTIMIZER, LORA = "--optimizer", "--lora"
_HELP: dict[str, Any] = {
    OPTIMIZER: {"metavar": "RECIPE", "help": "fp8jax.optim.adamw of this recipe, in place of optax's"},
    LORA: {"action": "store_true", "help": "train adapters alone"},
}


def options(text: str, *others: str) -> argparse.Namespace:
    """The options of a program: `text` is its docstring, `others` are `OPTIMIZER` and `LORA`, or neither."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--recipe", default="te,scaling=current", help="a recipe without scaling state")
    parser.add_argument("--steps", type=int, default=40)
    for name in others:
        parser.add_argument(name, **_HELP[name])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return parser.parse_args()


def batches(steps: int, seed: int = 0) -> list[np.ndarray]:
    """Tokens of a Markov chain in which each token has four successors; shape (BATCH, LENGTH + 1)."""
    rng = np.random.default_rng(seed)
    successors = rng.integers(0, VOCABULARY, (VOCABULARY, 4))
    found = []
    for _ in range(steps):
        tokens = [rng.integers(0, VOCABULARY, BATCH)]
        for _ in range(LENGTH):
            tokens.append(successors[tokens[-1], rng.integers(0, 4, BATCH)])
        found.append(np.stack(tokens, axis=1).astype(np.int32))
    return found


def main(
    package: str, train: Callable[..., Trained], given: argparse.Namespace, version: str | None = None
) -> None:
    """Trains by the recipe and by bf16, and prints the result.

    Args:
        package: the framework's name, as in a package registry.
        train: `train(recipe, options)`.
        given: the options.
        version: of a framework that is no package.
    """
    trained, beside = train(given.recipe, given), train("bf16", given)
    result: dict[str, Any] = {
        "framework": f"{package} {version or metadata.version(package)}",
        **vars(given),
        "loss": round(trained.loss, 4),
        "bf16": round(beside.loss, 4),
        "fp8_share": round(trained.fp8_share, 3),
    }
    print(json.dumps(result))
    is_close = abs(trained.loss - beside.loss) <= TOLERANCE * beside.loss
    sys.exit(0 if is_close and (trained.fp8_share > 0 or given.recipe == "bf16") else 1)
