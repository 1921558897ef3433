"""Train every level of the precision chart on the same data from the same seed, and compare.

    python examples/levels.py                                   # minutes, on the standard library's source
    python examples/levels.py --data shakespeare.txt --steps 2000
    python examples/levels.py --levels bf16 O2 O3 --seed 7 --out runs/levels

Model and validation are those of train_gpt.py; all its options work here but --recipe, --rules, --twin and
--resume. nvfp4-mixed is nvfp4 with the last quarter of the blocks in bf16. It needs blocks with paths of
their own, so all levels train with --no-scan.
Prints a table and leaves levels.json and levels.png, with all curves, in the run's folder. "update ms" is the
time of the optimizer, compiled by itself. "unchanged" is the mean share of the weights that a step left
unchanged because they are rounded to nearest.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import train_gpt

from fp8jax import train
from fp8jax.recipe import PRESETS
from fp8jax.train import metrics

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import clock
import gpt
import output

BASELINE = "bf16"
LEVELS = {name: ["--recipe", name] for name in PRESETS}
LEVELS["nvfp4-mixed"] = ["--recipe", "nvfp4", "--rules", "last=0.25"]
ROUNDS = 20  # of the update's time
FIGURES = ("weights", "gradients", "optimizer", "bytes", "step ms", "update ms")


def train_level(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Trains at a level; returns its row of the table."""
    run = train_gpt.prepare(["--no-scan", *argv, *LEVELS[name], "--no-twin"])
    fitted, (trainer,) = train_gpt.fit(run), run.trainers
    if fitted.exit_status:
        raise KeyboardInterrupt
    if fitted.steps < run.config.steps:
        raise KeyboardInterrupt
    variables, opt_state, curves = fitted.state.variables, fitted.state.opt_state, fitted.curves
    bytes_of = metrics.bytes_per_parameter(variables, trainer.gradients(), opt_state)
    sizes = {name: float(getattr(bytes_of, name)) for name in ("weights", "gradients", "optimizer")}
    timer = clock.timer(gpt.updates(trainer, variables, opt_state))
    return {
        "level": name,
        "rounding": "+".join(trainer.config.precision.rounding),
        "validation loss": curves.validation[-1][1],
        **sizes,
        "bytes": sum(sizes.values()),
        "step ms": 1e3 * curves.seconds / fitted.steps,
        "skipped": curves.skips,
        "unchanged": [share for _, share in curves.unchanged],
        "update ms": clock.row(clock.take_turns({name: timer}, ROUNDS), name)["ms"],
        "curve": curves.loss,
    }


def table(rows: output.Rows) -> str:
    """The rows without their curves, and each level's gap to the baseline."""
    base = {row["level"]: row["validation loss"] for row in rows}.get(BASELINE)
    shown = []
    for row in rows:
        loss = row["validation loss"]
        cells = {"level": row["level"], "rounding": row["rounding"], "validation loss": f"{loss:.4f}"}
        cells["gap"] = None if base is None else f"{loss - base:+.4f}"
        cells |= {title: f"{row[title]:.2f}" for title in FIGURES} | {"skipped": row["skipped"]}
        cells["unchanged"] = f"{np.mean(row['unchanged']):.0%}" if row["unchanged"] else None
        shown.append(cells)
    return output.table(shown)


def draw(rows: output.Rows, path: pathlib.Path) -> None:
    """All training curves, smoothed over a fiftieth of the run."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), dpi=150)).subplots()
    for row in rows:
        width = max(len(row["curve"]) // 50, 1)
        smooth = np.convolve(row["curve"], np.ones(width) / width, "valid")
        axes.plot(np.arange(len(smooth)) + width, smooth, label=row["level"], linewidth=1)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=list(LEVELS), metavar="LEVEL")
    parser.add_argument("--out", default="runs/levels", help="folder; one of that name must not exist")
    args, others = parser.parse_known_args(argv)
    folder, rows = pathlib.Path(args.out), []
    try:
        if folder.exists():
            raise train.BadInput(f"--out {folder} exists; name another folder")
        with train.blame_input():
            for name in args.levels:
                rows.append(train_level(name, [*others, "--out", str(folder / name)]))
    except train.BadInput as error:
        print(f"levels: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("levels: interrupted; the levels that were done are in their folders", file=sys.stderr)
        return 130
    (folder / "levels.json").write_text(json.dumps(rows, indent=1))
    draw(rows, folder / "levels.png")
    print(f"\n{table(rows)}\n\n{folder / 'levels.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
