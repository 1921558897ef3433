"""The time of `fp8jax.statistics` next to a training step, on this machine.

    python examples/bench/numerics.py
    python examples/bench/numerics.py --recipe te --batch 24 --rounds 20

The step is that of the default run of `examples/train_gpt.py`: gradients and AdamW of a GPT in the recipe.
Statistics are of the whole batch and of a quarter of it: under all recipes, under the model's own alone, and
under that and its current scaling, as the trainer takes them of a quarter. The ways take turns; "/ step" is
within this run, and "every 50" is the share of the time that statistics in every 50th step add.
"""

import math
from typing import Any

import clock
import jax
import jax.numpy as jnp
import output

import fp8jax
from fp8jax.inspect.step import training_step
from fp8jax.inspect.subject import loss_of, subject, transformed
from fp8jax.scaling import with_fresh_scales

EVERY = 50


def rows(args: Any) -> output.Rows:
    """One row for the step, and one for each statistics."""
    sizes = {name: getattr(args, name) for name in ("layers", "width", "heads", "context", "batch")}
    of = subject("gpt", dtype="float32", vocabulary=args.vocabulary, **sizes)
    model = transformed(of.model, args.recipe)
    loss, (shapes, *_) = loss_of(model, of.inputs, of.loss)
    tokens = jax.random.randint(jax.random.key(1), of.inputs[0].shape, 0, args.vocabulary)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    step = training_step(loss, shapes, *of.inputs, recipe=args.recipe)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.args[1])
    compiled = jax.jit(step.function)
    turns = {"step": clock.timer(lambda: compiled(variables, state, tokens))}
    quarter = tokens[: max(args.batch // 4, 1)]
    current = with_fresh_scales(fp8jax.Recipe.parse(args.recipe))
    ways = {
        "all recipes": fp8jax.inspect.numerics.RECIPES,
        args.recipe: (args.recipe,),
        f"{args.recipe} and current scaling": (args.recipe, current),
    }
    for name, recipes in ways.items():
        measure = jax.jit(fp8jax.statistics(loss, recipes))
        for part, of_part in ((tokens, "the batch"), (quarter, "a quarter")):
            run = lambda measure=measure, part=part: measure(variables, part)  # noqa: E731
            turns[f"{name}, {of_part}"] = clock.timer(run)
    times = clock.take_turns(turns, args.rounds)
    return [
        {
            "what": name,
            "ms": clock.row(times, name)["ms"],
            "/ step": ratio,
            "every 50": f"{ratio / EVERY:.1%}",
        }
        for name in turns
        for ratio in [clock.ratio(times, name, "step") or math.nan]
    ]


def main() -> None:
    """Measures and prints."""
    sizes: dict[str, Any] = {
        "layers": 4,
        "width": 128,
        "heads": 4,
        "batch": 12,
        "context": 64,
        "vocabulary": 128,
    }
    tiny = {"layers": 1, "width": 32, "heads": 1, "batch": 2, "context": 32, "rounds": 1}
    args = output.parse(__doc__, tiny=tiny, recipe="fp8", rounds=10, **sizes)
    shape = ", ".join(f"{name} {getattr(args, name)}" for name in sizes)
    output.finish(
        "numerics", output.device(), {f"{output.device()}, {args.recipe}, {shape}": rows(args)}, args
    )


if __name__ == "__main__":
    main()
