"""Train many seeds of each recipe, paired with bf16 on the same weights and batches, and compare the losses.

    python examples/paired.py --data tinyshakespeare.txt
    python examples/paired.py --data tinyshakespeare.txt --ways te O2 fp8 --seeds 10 --out runs/paired
    python examples/paired.py --data text.txt --steps 200 --seeds 3

Model and validation are those of train_gpt.py, and its options work here. Each run is a process of its own,
in the folder --out/WAY-SEED. Runs that are done are not trained again, and runs that were stopped go on: give
the command again, also with more ways and seeds. It prints a table and leaves paired.json, with the loss of
every tenth step of each run, and paired.png.

"gap" is the mean difference of the last validation losses from those of bf16 with the same seed, with a 95%
interval and the p-value of a paired t-test. "could tell" is the gap that such a test would have found in 80%
of cases.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
import output

BASELINE = "bf16"
GAP = ("gap", "95%", "p", "could tell")
RESIDUALS = ("--gradient-checkpointing", "dots_fp8")
WAYS = {
    **{name: ("--recipe", name) for name in ("bf16", "te", "O2", "fp8", "fp8_6", "block", "mxfp8")},
    "bf16, FP8 residuals": ("--recipe", "bf16", *RESIDUALS),
    "fp8_6, FP8 residuals": ("--recipe", "fp8_6", *RESIDUALS),
}
PROGRAM = pathlib.Path(__file__).resolve().parent / "train_gpt.py"


def train(way: str, seed: int, folder: pathlib.Path, options: Sequence[str]) -> dict[str, Any]:
    """The result of a run, which is trained if it is not there.

    Raises:
        SystemExit: the run failed or was stopped.
    """
    place = folder / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (place / "result.json").exists():
        command = [sys.executable, str(PROGRAM), *options, *WAYS[way], "--no-twin", "--seed", str(seed)]
        status = subprocess.run([*command, "--out", str(place), "--resume", "--or-start"]).returncode
        if status:
            raise SystemExit(status)
    result = json.loads((place / "result.json").read_text())
    [model] = result["models"].values()
    lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return {
        "way": way,
        "seed": seed,
        "command": result["command"],
        "device": result["device"],
        "date": result["date"],
        "versions": result["versions"],
        "validation loss": model["validation_loss"],
        "bytes": sum(model["bytes_per_parameter"].values()),
        "losses": {line["step"]: line["loss"] for line in lines if "loss" in line},
    }


def compare(runs: list[dict[str, Any]]) -> output.Rows:
    """A row for each way: its loss, and its gap to the baseline with the same seeds."""
    base = {run["seed"]: run["validation loss"] for run in runs if run["way"] == BASELINE}
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        own = [run for run in runs if run["way"] == way and run["seed"] in base]
        row = {
            "way": way,
            "seeds": len(own),
            "bytes": f"{own[0]['bytes']:.2f}",
            "loss": f"{np.mean([run['validation loss'] for run in own]):.4f}",
        } | dict.fromkeys(GAP)
        if way != BASELINE and len(own) > 1:
            row |= gap([run["validation loss"] - base[run["seed"]] for run in own])
        rows.append(row)
    return rows


def gap(differences: Sequence[float]) -> dict[str, Any]:
    """The mean of paired differences, its 95% interval, the p-value, and the gap that they could tell."""
    n, mean = len(differences), np.mean(differences)
    error = np.std(differences, ddof=1) / n**0.5
    low, high = stats.t.interval(0.95, n - 1, mean, error)
    p = stats.ttest_1samp(differences, 0).pvalue
    least = (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * error
    cells = f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", f"{p:.2f}", f"{least:.4f}"
    return dict(zip(GAP, cells, strict=True))


def draw(runs: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bytes per parameter of weights, gradients and optimizer against the gaps, a point for each seed."""
    from matplotlib.figure import Figure

    base = {run["seed"]: run["validation loss"] for run in runs if run["way"] == BASELINE}
    axes = (figure := Figure(figsize=(7, 4), dpi=150)).subplots()
    for way in dict.fromkeys(run["way"] for run in runs if run["way"] != BASELINE):
        own = [run for run in runs if run["way"] == way and run["seed"] in base]
        gaps = [run["validation loss"] - base[run["seed"]] for run in own]
        [line] = axes.plot([run["bytes"] for run in own], gaps, ".", alpha=0.4)
        axes.plot(own[0]["bytes"], np.mean(gaps), "_", ms=16, mew=3, color=line.get_color(), label=way)
    axes.axhline(0, color="gray", linewidth=1)
    axes.set(xlabel="bytes per parameter", ylabel="validation loss - bf16's, nats per character")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> None:
    """Trains what is missing, prints and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, default=10, help="of each way: 1 to this number")
    parser.add_argument("--out", default="runs/paired", help="the folder of the runs")
    args, options = parser.parse_known_args(argv)
    folder = pathlib.Path(args.out)
    options = ["--steps", "2000", *options]  # the last one counts
    ways = dict.fromkeys([BASELINE, *args.ways])
    pairs = [(way, seed) for seed in range(1, args.seeds + 1) for way in ways]
    try:
        runs = [train(*pair, folder, options) for pair in pairs]
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    (folder / "paired.json").write_text(json.dumps(runs))
    draw(runs, folder / "paired.png")
    print(f"\n{output.table(compare(runs))}\n\n{folder / 'paired.png'}")


if __name__ == "__main__":
    main()
