"""The largest batch of a decoder that fits a device, by recipe, as the batch size "auto" finds it.

    python examples/bench/batch.py --target h200 --recipes O2       # of a GPU that is not here; minutes
    python examples/bench/batch.py --budget 4 --recipes bf16 O2     # of 4 GB of this machine's memory
    python examples/bench/batch.py --tiny

Programs of the training step are compiled until one fits and the one of a row more does not; none is run.
The decoder is that of examples/techniques.py: plain Flax layers, by default 12 scanned ones of 768, 12 heads,
32768 words and rows of 512 tokens.
"""

import argparse
import pathlib
import sys
import time
from typing import Any

import output

from fp8jax.inspect import targets
from fp8jax.train.step.batch_size import budget_of_device

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import techniques


def row(recipe: str, budget: float, target: str, sizes: techniques.Sizes) -> dict[str, Any]:
    """What was found, and how many programs it took."""
    settings = {"per_device_train_batch_size": "auto", "memory_budget": budget, "target": target}
    start = time.perf_counter()
    found = techniques.prepare({**settings, "recipe": recipe}, sizes).trainer.found
    assert found is not None  # since the batch size is "auto"
    return {
        "recipe": recipe,
        "rows": found.rows,
        "GB": found.bytes / 1e9,
        "of a row more": found.next_bytes and found.next_bytes / 1e9,
        "budget": budget,
        "programs": len(found.compiled),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Searches and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=["bf16", "O2"])
    parser.add_argument("--target", choices=list(targets.TARGETS), help="a GPU that is not here")
    parser.add_argument("--budget", type=float, default=0.0, help="GB; by default what XLA may take")
    for name, default in {"layers": 12, "width": 768, "heads": 12, "context": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=32768)
    output.add_options(parser)
    args = parser.parse_args()
    if args.target and (reason := targets.why_not()):
        sys.exit(reason)
    sizes = techniques.Sizes(args.layers, args.width, args.heads, args.context, args.vocabulary)
    budget = args.budget
    if args.tiny:
        sizes, budget = techniques.TINY, 0.002
    budget = budget or budget_of_device(args.target or "") / 1e9
    rows = [row(recipe, budget, args.target or "", sizes) for recipe in args.recipes]
    device = args.target or output.cpu_name()
    title = f"{device}, {sizes.layers} layers of {sizes.width}, rows of {sizes.context} tokens"
    output.finish("batch", device, {title: rows}, args)


if __name__ == "__main__":
    main()
