"""Train small models where low precision has a hard time, in each recipe, and compare the losses with bf16's.

    python examples/hard_cases.py
    python examples/hard_cases.py --cases outliers spike --recipes te fp8 --seeds 5 --picture hard_cases.png

- "outliers": one of 128 input channels is 100 times the others, which matter as much for the target.
- "cosine tail": betas (0.9, 0.95), and a cosine to 1% of the rate over 5000 steps.
- "Zipf": an embedding of 2048 words that occur with Zipf's frequencies, each with a target of its own.
- "experts": a mixture of 8 experts, of which the router prefers some: sorted rows, unbalanced.
- "fine-tuning": a trained model goes on at a rate of 1e-6, to a target that is near.
- "LoRA": the same with adapters of rank 8 on frozen kernels of the recipe, at a rate of 1e-3.
- "spike": at step 1000 of 2000 a batch of garbage: inputs times 1000, targets without a pattern.
- "long": 20,000 steps of a small model.

Weights before they are rounded and batches are the same for each recipe. A figure is the final loss on new
data as a multiple of bf16's, the geometric mean over seeds. In parentheses is the same for the plain model
with the trained weights, in float32: without the noise of FP8 in the forward. The picture has both with their
95% intervals, of Student's t over the logarithms. "skipped" counts steps with gradients that were not finite.
Below is what `fp8jax.statistics` and `step_statistics` say of the last step of the recipe with the largest
loss.
"""

import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paired
from hard_models import CASES, Batch, Case, mean_square, plain

import fp8jax
from fp8jax.inspect.numerics import step_statistics

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import output

BASELINE = paired.BASELINE


def variables_of(case: Case, model: Any, seed: int) -> Any:
    """The first variables; trained ones for a case with `warm` steps."""
    key = jax.random.key(seed)
    example = case.batch(key, -1)["x"]
    variables = model.init(key, example)
    if not case.warm:
        return variables
    first = dataclasses.replace(case, batch=plain, steps=case.warm, warm=0, rate=1e-3, lora=None)
    params = train(first, "fp32", seed)[0].variables["params"]
    return model.quantize({"params": params}, like=variables)


def new_data(case: Case) -> list[Batch]:
    """Batches that no training sees."""
    return [case.batch(jax.random.key(number), -1) for number in range(8)]


class Trained(NamedTuple):
    """The end of a training."""

    variables: Any
    loss: float  # on new data, as it was trained
    of_plain: float  # of the plain model with the trained weights, in float32
    skipped: int  # steps


@functools.cache
def train(case: Case, recipe: str, seed: int) -> tuple[Trained, Any]:
    """Trains; also gives the last step, for `said`."""
    model: Any = fp8jax.transform(case.model, recipe, lora=case.lora)
    tx = optax.chain(
        fp8jax.optim.clip_by_global_norm(1.0),
        fp8jax.optim.adamw(case.rate, recipe, *case.betas, weight_decay=0.0),
    )
    key = jax.random.key(seed + 100)

    def loss(variables: Any, batch: Batch) -> jax.Array:
        return mean_square(model.apply(variables, batch["x"]), batch)

    def step(variables: Any, state: Any, number: Any) -> Any:
        batch = case.batch(jax.random.fold_in(key, number), number)
        _, grads, variables = fp8jax.value_and_grad(loss)(variables, batch)
        updates, state = tx.update(grads, state, variables)
        return fp8jax.apply_updates(variables, updates), state, grads

    @jax.jit
    def run(variables: Any, state: Any) -> Any:
        def body(carry: Any, number: Any) -> Any:
            variables, state = carry
            return step(variables, state, number)[:2], None

        carry, _ = jax.lax.scan(body, (variables, state), jnp.arange(case.steps - 1))
        *after, grads = step(*carry, case.steps - 1)
        losses = jnp.stack([loss(after[0], batch) for batch in new_data(case)])
        return carry, tuple(after), grads, jnp.mean(losses)

    variables = variables_of(case, model, seed)
    before, after, grads, final = run(variables, tx.init(variables))
    skipped = int(optax.tree.get(after[1], "skipped"))
    dequantized, apply = model.dequantize(after[0]), cast(Any, case.model).apply
    of_plain = [mean_square(apply(dequantized, batch["x"]), batch) for batch in new_data(case)]
    end = Trained(after[0], float(final), float(jnp.mean(jnp.stack(of_plain))), skipped)
    return end, (loss, before, after, grads, case.batch(key, -1))


def said(case: Case, recipe: str, seed: int) -> str:
    """The verdict of the statistics of the last step: lost updates, zero moments, the worst layer."""
    end, (loss, before, after, grads, batch) = train(case, recipe, seed)
    rows = list(step_statistics(grads, before, after).items())
    name, lost = max(((name, float(row.lost)) for name, row in rows), key=lambda pair: np.nan_to_num(pair[1]))
    moments = max(float(np.nan_to_num(row.second_underflow)) for _, row in rows)
    parts = [
        f"{100 * lost:.0f}% of the updates of {name} lost",
        f"second moments that are zero {moments:.0%}",
    ]
    if fp8jax.Recipe.parse(recipe).is_quantized:
        found = fp8jax.statistics(loss, [recipe])(end.variables, batch)
        parts.append(fp8jax.advise(found, recipe=recipe).reasons[0])
    return "; ".join(parts)


class Ratio(NamedTuple):
    """A loss as a multiple of bf16's: the geometric mean over seeds, and its 95% interval."""

    mean: float
    low: float
    high: float


def ratio_of(losses: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratio of these losses to bf16's of the same seeds; the interval of one seed is not a number."""
    return Ratio(*map(math.exp, paired.interval(list(np.log(losses) - np.log(base)))))


def ratios_of(runs: output.Rows, case: str, recipe: str) -> tuple[Ratio, Ratio]:
    """The ratios of both losses of a recipe in a case."""
    own, base = (
        sorted(
            (run for run in runs if (run["case"], run["recipe"]) == (case, name)), key=lambda run: run["seed"]
        )
        for name in (recipe, BASELINE)
    )
    first, second = (
        ratio_of([run[which] for run in own], [run[which] for run in base]) for which in ("loss", "of plain")
    )
    return first, second


def draw(runs: output.Rows, path: pathlib.Path) -> None:
    """Each case's losses as multiples of bf16's, as trained and, with a hollow mark, of the plain model."""
    from matplotlib.figure import Figure

    cases, recipes = (list(dict.fromkeys(run[key] for run in runs)) for key in ("case", "recipe"))
    recipes.remove(BASELINE)
    figure = Figure(figsize=(7, 0.7 + 0.62 * len(cases)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, recipe in enumerate(recipes):
        heights = np.arange(len(cases)) + 0.7 * ((place + 0.5) / len(recipes) - 0.5)
        for which, face in enumerate((f"C{place}", "none")):
            found = np.array([ratios_of(runs, case, recipe)[which] for case in cases])
            axes.errorbar(
                found[:, 0],
                heights + 0.25 * which / len(recipes),
                xerr=np.nan_to_num(np.abs(found[:, 1:] - found[:, :1]).T),
                fmt="o" if which == 0 else "s",
                color=f"C{place}",
                markerfacecolor=face,
                markersize=4,
                linewidth=1,
                label=recipe if which == 0 else None,
            )
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.7, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0) if tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("loss / bf16's; squares: the plain model with the trained weights")
    axes.legend(loc="best", fontsize="small")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path)


def main() -> None:
    """Trains, compares, prints and draws."""
    recipes = ["te", "current", "block", "mxfp8", "O2", "fp8", "fp8_6"]
    args = output.parse(
        __doc__,
        tiny={"seeds": 1, "steps": 4},
        cases=list(CASES),
        recipes=recipes,
        seeds=3,
        steps=0,
        picture="",
    )
    args.recipes = [name for name in dict.fromkeys(args.recipes) if name != BASELINE]
    if not args.recipes:
        sys.exit(f"--recipes: expected a recipe beside {BASELINE}; got none")
    runs: output.Rows = []
    rows, notes = [], []
    for name in args.cases:
        case = CASES[name]
        if args.steps:
            case = dataclasses.replace(case, steps=args.steps, warm=min(case.warm, args.steps))
        for recipe in (BASELINE, *args.recipes):
            for seed in range(args.seeds):
                end = train(case, recipe, seed)[0]
                runs.append(
                    {
                        "case": name,
                        "recipe": recipe,
                        "seed": seed,
                        "loss": end.loss,
                        "of plain": end.of_plain,
                        "skipped": end.skipped,
                    }
                )
        ratios = {recipe: ratios_of(runs, name, recipe) for recipe in args.recipes}
        worst = max(ratios, key=lambda recipe: np.nan_to_num(ratios[recipe][0].mean, nan=np.inf))
        cells = {recipe: f"{own.mean:.3f} ({plain.mean:.3f})" for recipe, (own, plain) in ratios.items()}
        found = [run for run in runs if run["case"] == name]
        loss = np.mean([run["loss"] for run in found if run["recipe"] == BASELINE])
        skipped = sum(run["skipped"] for run in found)
        rows.append({"case": name, "bf16's loss": f"{loss:.3g}", **cells, "skipped": skipped})
        notes.append({"case": name, "recipe": worst, "last step of seed 0": said(case, worst, 0)})
        train.cache_clear()
    sections = {
        "final loss / bf16's": rows,
        **({"runs": runs, "statistics": notes} if args.json or args.record else {}),
    }
    output.finish("hard_cases", output.device(), sections, args)
    if args.picture:
        draw(runs, pathlib.Path(args.picture))
    if not args.json:
        lines = (f"{note['case']}, {note['recipe']}: {note['last step of seed 0']}" for note in notes)
        print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
