"""Bytes of a step with and without gradient checkpointing, compiled for a GPU or this CPU.

    python examples/bench/blocks.py                  # for an H200 that need not be here
    python examples/bench/blocks.py --target cpu
    python examples/bench/blocks.py --json

A training step of a GPT (8 scanned layers of 512, 4 sequences of 512 tokens, bfloat16) without
rematerialization of its own, under each `gradient_checkpointing` of `fp8jax.transform`. Temporaries are the
peak less the bytes that are kept between steps.
"""

import sys
from typing import Any

import output

import fp8jax
from fp8jax.inspect import memory, subject, targets

SIZES = {"layers": 8, "heads": 8, "width": 512, "context": 512, "vocabulary": 8192, "batch": 4}
TINY = {"layers": 2, "heads": 2, "width": 32, "context": 32, "vocabulary": 65, "batch": 2}


def rows(recipe: str, sizes: dict[str, Any], target: str | None) -> output.Rows:
    """One row per setting."""
    of, found = subject.subject("gpt", remat=False, **sizes), []
    for keep in ("none", "dots", "full") if recipe == "bf16" else ("none", "dots", "fp8", "full"):
        model = fp8jax.transform(of.model, recipe, gradient_checkpointing=keep)
        plan = memory.plan(model, recipe, *of.inputs, loss=of.loss, target=target)
        row = {"recipe": recipe, "gradient_checkpointing": keep, "temporaries MB": plan.temporaries / 1e6}
        found.append(row)
        row["/ none"] = row["temporaries MB"] / found[0]["temporaries MB"]
    return found


def main() -> None:
    """Compiles and prints."""
    choices = {"target": [*targets.TARGETS, "cpu"]}
    args = output.parse(__doc__, choices=choices, target="h200", recipes=["te", "bf16"])
    target = None if args.target == "cpu" else args.target
    if target is not None and (reason := targets.why_not()):
        sys.exit(reason)
    sizes = TINY if args.tiny else SIZES
    found = [row for recipe in args.recipes for row in rows(recipe, sizes, target)]
    device = output.cpu_name() if target is None else target
    output.finish("blocks", device, {"training step of a GPT": found}, args)


if __name__ == "__main__":
    main()
