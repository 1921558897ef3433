"""The largest batch of a decoder that fits a device, by recipe, as the batch size "auto" finds it.

    python examples/bench/batch.py --target h200 --recipes O2       # of a GPU that is not here; minutes
    python examples/bench/batch.py --budget 4 --recipes bf16 O2     # of 4 GB of this machine's memory
    python examples/bench/batch.py --tiny

Training steps are compiled, and do not run, until one fits and the step with one more row does not. The
decoder is that of examples/techniques.py: plain Flax layers, by default 12 scanned layers of 768, 12 heads,
32768 words and rows of 512 tokens. The default budget is the memory that XLA may take.
"""

import pathlib
import sys
import time
from typing import Any

import output

from fp8jax.inspect import targets
from fp8jax.train import TrainConfig
from fp8jax.train.step.batch_size import budget_of_device

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import techniques


def row(recipe: str, budget: float, target: str, sizes: techniques.Sizes) -> dict[str, Any]:
    """The batch found, and the number of programs compiled for it."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": "auto",
        "memory_budget": budget,
        "target": target,
    }
    start = time.perf_counter()
    found = techniques.prepare(TrainConfig(recipe=recipe, **settings), sizes).found
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
    sizes = {"layers": 12, "width": 768, "heads": 12, "context": 512, "vocabulary": 32768}
    args = output.parse(
        __doc__,
        tiny={**techniques.TINY._asdict(), "budget": 0.002},
        choices={"target": targets.TARGETS},
        recipes=["bf16", "O2"],
        target="",
        budget=0.0,
        **sizes,
    )
    if args.target and (reason := targets.why_not()):
        sys.exit(reason)
    sizes = techniques.Sizes(*(getattr(args, name) for name in sizes))
    budget = args.budget or budget_of_device(args.target) / 1e9
    rows = [row(recipe, budget, args.target, sizes) for recipe in args.recipes]
    device = args.target or output.cpu_name()
    title = f"{device}, {sizes.layers} layers of {sizes.width}, rows of {sizes.context} tokens"
    output.finish("batch", device, {title: rows}, args)


if __name__ == "__main__":
    main()
