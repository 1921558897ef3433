"""Bytes of a step with and without gradient checkpointing, compiled for a GPU or this CPU.

    python examples/bench/blocks.py                  # for an H200 that need not be here
    python examples/bench/blocks.py --target cpu
    python examples/bench/blocks.py --json

A training step of a GPT (8 scanned layers of 512, 4 sequences of 512 tokens, bfloat16) that has no
rematerialization of its own, under each `gradient_checkpointing` of `fp8jax.transform`. Temporaries are what
the program needs besides its arguments and results.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import output

import fp8jax
from fp8jax.inspect import program, subject, targets

SIZES = {"layers": 8, "heads": 8, "width": 512, "context": 512, "vocabulary": 8192, "batch": 4}
TINY = {"layers": 2, "heads": 2, "width": 32, "context": 32, "vocabulary": 65, "batch": 2}


def compiled(step: Any, args: tuple[Any, ...], target: str | None, **donated: Any) -> program.Program:
    """The program of a function."""
    if target is None:
        return program.read(jax.jit(step, **donated).lower(*args).compile())
    return program.read(targets.compile_for(step, *args, target=target, **donated))


def of_blocks(recipe: str, sizes: dict[str, Any], target: str | None) -> list[dict[str, Any]]:
    """One row per setting."""
    of, rows = subject.subject("gpt", remat=False, **sizes), []
    for keep in ("none", "dots", "fp8", "full"):
        if keep == "fp8" and recipe == "bf16":
            continue  # it has no FP8 operands
        model = fp8jax.transform(of.model, recipe, gradient_checkpointing=keep)
        found = compiled(*step_of(of, model, recipe), target, donate_argnums=(0, 1))
        row = {"recipe": recipe, "gradient_checkpointing": keep, "temporaries MB": found.temporaries / 1e6}
        rows.append(row)
        row["/ none"] = row["temporaries MB"] / rows[0]["temporaries MB"]
        row["GEMMs"] = found.count()
    return rows


def step_of(of: subject.Subject, model: Any, recipe: str) -> tuple[Any, tuple[Any, ...]]:
    """A training step, and the shapes of its arguments."""
    tx, [tokens] = fp8jax.optim.adamw(1e-3, recipe), of.inputs

    def init(key: Any) -> Any:
        variables = model.init(key, jnp.zeros(tokens.shape, tokens.dtype))
        return variables, tx.init(variables)

    def step(variables: Any, opt_state: Any, tokens: Any) -> Any:
        loss_fn = lambda variables: of.loss(model.apply(variables, tokens), tokens)  # noqa: E731
        loss, grads = fp8jax.value_and_grad(loss_fn)(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    return step, (*jax.eval_shape(init, jax.random.key(0)), tokens)


def main() -> None:
    """Compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", choices=[*targets.TARGETS, "cpu"])
    parser.add_argument("--recipes", nargs="+", default=["te", "bf16"], metavar="RECIPE")
    output.add_options(parser)
    args = parser.parse_args()
    target = None if args.target == "cpu" else args.target
    if target is not None and (reason := targets.why_not()):
        parser.error(reason)
    sizes = TINY if args.tiny else SIZES
    rows = [row for recipe in args.recipes for row in of_blocks(recipe, sizes, target)]
    sections = {"training step of a GPT": rows}
    output.finish("blocks", output.cpu_name() if target is None else args.target, sections, args)


if __name__ == "__main__":
    main()
