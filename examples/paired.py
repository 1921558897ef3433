"""Train many seeds of each recipe, paired with bf16 on the same weights and batches, and compare the losses.

    python examples/paired.py --data tinyshakespeare.txt
    python examples/paired.py --data tinyshakespeare.txt --ways te O2 fp8 --seeds 10 --out runs/paired
    python examples/paired.py --data text.txt --steps 200 --seeds 3
    python examples/paired.py --record examples/records/2026-11-28_cpu2_paired/paired.json --out compared
    python examples/paired.py --record paired.json --baseline te --ways O2 fp8

Model and validation are those of train_gpt.py, and its options work here. Rivals of fp8jax are bf16 weights
with bf16 Adam, an Adam with moments of 8 bits in blocks, and FlashOptim, see rivals.py. Each run is a process
of its own, in the folder --out/WAY-SEED. Runs that are done are not trained again, and runs that were stopped
go on (those of rivals.py begin again): give the command again, also with more ways and seeds. It prints a
table and leaves paired.json, with the mean loss of every ten steps of each run, paired.png and gaps.png. With
--record it trains nothing, and compares the runs of a paired.json. With --baseline the runs are paired with
those of another way than bf16.

"bytes" are those of weight, gradient and moments per parameter, "peak MB" the memory of the compiled step on
this device, with activations. "base" is the baseline's loss with the same seeds on the same devices. "gap" is
the mean difference of the last validation losses from those, with a 95% interval and the p-value of a paired
t-test. "could tell" is the gap that such a test would have found in 80% of cases. "training gap" is the mean
difference of the training losses, averaged over the last tenth of the steps.
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
IN_TRAINING = "training gap, 95%"
PARTS = ("weights", "gradients", "optimizer")  # of the bytes per parameter
RECIPES = ("te", "current", "O2", "fp8", "fp8_6", "block", "mxfp8")
RESIDUALS = ("--gradient-checkpointing", "dots_fp8")
OURS, RIVALS = "train_gpt.py", "rivals.py"
# Name -> program and options.
WAYS = {
    **{name: (OURS, "--recipe", name) for name in (BASELINE, *RECIPES)},
    "bf16, FP8 residuals": (OURS, "--recipe", "bf16", *RESIDUALS),
    "fp8_6, FP8 residuals": (OURS, "--recipe", "fp8_6", *RESIDUALS),
    "8-bit Adam": (OURS, "--recipe", "bf16", "--optim", "adamw_8bit"),
    "bf16 weights and Adam": (RIVALS, "--way", "bf16-adam"),
    "FlashOptim": (RIVALS, "--way", "flashoptim"),
}


def train(way: str, seed: int, folder: pathlib.Path, options: Sequence[str]) -> dict[str, Any]:
    """The result of a run, which is trained if it is not there.

    Raises:
        SystemExit: the run failed or was stopped.
    """
    place = folder / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (place / "result.json").exists():
        program, *own = WAYS[way]
        path = pathlib.Path(__file__).resolve().parent / program
        command = [sys.executable, str(path), *options, *own, "--no-twin", "--seed", str(seed)]
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
        "bytes": {part: model["bytes_per_parameter"][part] for part in PARTS},
        "peak": next(part["compiled"] for part in model["memory"] if part["part"] == "peak"),
        "losses": {line["step"]: line["loss"] for line in lines if "loss" in line},
    }


def compare(runs: list[dict[str, Any]], baseline: str = BASELINE) -> output.Rows:
    """A row for each way: its loss, and its gap to the baseline with the same seeds on the same device."""
    alike = {pair_of(run): run for run in runs if run["way"] == baseline}
    base = {pair: run["validation loss"] for pair, run in alike.items()}
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        first, *_ = each = [run for run in runs if run["way"] == way]
        own = [run for run in each if pair_of(run) in base]
        row = {
            "way": way,
            "seeds": len(own),
            "bytes": f"{sum(first['bytes'].values()):.2f}",
            "peak MB": f"{first['peak'] / 1e6:.1f}",
            "loss": f"{np.mean([run['validation loss'] for run in own]):.4f}" if own else "no pair",
            "base": f"{np.mean([base[pair_of(run)] for run in own]):.4f}" if own else "no pair",
        } | dict.fromkeys([*GAP, IN_TRAINING])
        if way != baseline and len(own) > 1:
            row |= gap([run["validation loss"] - base[pair_of(run)] for run in own])
            in_training = gap([trained(run) - trained(alike[pair_of(run)]) for run in own])
            row |= {IN_TRAINING: f"{in_training['gap']}, {in_training['95%']}"}
        rows.append(row)
    return rows


def pair_of(run: dict[str, Any]) -> tuple[Any, int]:
    """The device and the seed: another CPU gives the baseline another loss."""
    return run.get("device"), run["seed"]


def trained(run: dict[str, Any]) -> float:
    """The mean training loss of the last tenth of the steps."""
    last = 0.9 * max(map(int, run["losses"]))
    return float(np.mean([loss for step, loss in run["losses"].items() if int(step) > last]))


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences, and its 95% interval by Student's t; not a number for one pair."""
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return mean, float("nan"), float("nan")
    half = float(stats.t.ppf(0.975, n - 1) * np.std(differences, ddof=1) / n**0.5)
    return mean, mean - half, mean + half


def gap(differences: Sequence[float]) -> dict[str, Any]:
    """The mean of paired differences, its 95% interval, the p-value, and the gap that they could tell."""
    n, (mean, low, high) = len(differences), interval(differences)
    error = np.std(differences, ddof=1) / n**0.5
    test: Any = stats.ttest_1samp(differences, 0)
    least = (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * error
    cells = f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", f"{test.pvalue:.3f}", f"{least:.4f}"
    return dict(zip(GAP, cells, strict=True))


def draw(runs: list[dict[str, Any]], baseline: str, path: pathlib.Path) -> None:
    """The training losses, as means over the seeds that all ways have and over 100 steps, and the bytes per
    parameter beside the gaps."""
    from matplotlib.figure import Figure

    rows, count = compare(runs, baseline), min(10, len(runs[0]["losses"]))
    seeds = set.intersection(*({run["seed"] for run in runs if run["way"] == row["way"]} for row in rows))
    curves, bars = (figure := Figure(figsize=(10, 3.6), dpi=150, layout="constrained")).subplots(1, 2)
    for number, row in enumerate(rows):
        own = [run for run in runs if run["way"] == row["way"] and run["seed"] in seeds]
        mean = np.mean([list(run["losses"].values()) for run in own], axis=0)
        steps = [int(step) for step in own[0]["losses"]][count - 1 :]
        smooth = np.convolve(mean, np.ones(count) / count, "valid")
        curves.plot(steps, smooth, "--" if number >= 10 else "-", label=row["way"], linewidth=1)
    curves.set(xlabel="step", ylabel="training loss, nats per character")
    curves.legend(fontsize=7)
    names = [row["way"] for row in rows][::-1]
    sizes = {run["way"]: run["bytes"] for run in runs}
    left = np.zeros(len(rows))
    for part in PARTS:
        widths = np.array([sizes[name][part] for name in names])
        bars.barh(names, widths, left=left, label=part)
        left += widths
    for number, row in enumerate(rows[::-1]):
        text = row["gap"] or f"loss {row['loss']}"  # losses of other numbers of seeds say nothing
        bars.text(left[number] + 0.2, number, text, va="center", fontsize=9)
    bars.set(xlabel="bytes per parameter", xlim=(0, 1.6 * max(left)))
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(PARTS), fontsize=7, frameon=False)
    figure.savefig(path)


def draw_gaps(runs: list[dict[str, Any]], baseline: str, path: pathlib.Path) -> None:
    """The gap of each way, with its 95% interval, over its bytes per parameter."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), dpi=150, layout="constrained")).subplots()
    rows = [row for row in compare(runs, baseline) if row["gap"]]
    for number, row in enumerate(rows):
        low, high = map(float, row["95%"].split(" to "))
        alike = sum(round(float(other["bytes"])) == round(float(row["bytes"])) for other in rows[:number])
        x, mean = float(row["bytes"]) + 0.3 * alike, float(row["gap"])
        label = f"{row['way']}, {row['seeds']} pairs"
        shape, color = "os^D"[number // 6], f"C{number % 6}"
        half = [[mean - low], [high - mean]]
        axes.errorbar([x], [mean], half, fmt=shape, color=color, capsize=3, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(
        xlabel="bytes per parameter; ways of the same size side by side",
        ylabel=f"validation loss above {baseline}, with 95% intervals",
    )
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.63, 1))
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains what is missing, prints and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--baseline",
        default=BASELINE,
        choices=list(WAYS),
        metavar="WAY",
        help="of the gaps, bf16 unless given",
    )
    parser.add_argument("--seeds", type=int, default=10, help="of each way: 1 to this number")
    parser.add_argument("--out", default="runs/paired", help="the folder of the runs, and of the pictures")
    parser.add_argument("--record", metavar="FILE", help="compare the runs of this paired.json")
    args, options = parser.parse_known_args(argv)
    folder = pathlib.Path(args.out)
    if args.seeds < 1:
        parser.error(f"--seeds: expected 1 or more; got {args.seeds}")
    folder.mkdir(parents=True, exist_ok=True)
    if args.record:
        if options:
            parser.error(f"--record trains nothing, so it takes no other options; got {' '.join(options)}")
        ways, runs = {args.baseline, *args.ways}, json.loads(pathlib.Path(args.record).read_text())
        runs = [run for run in runs if run["way"] in ways and run["seed"] <= args.seeds]
        show(runs, args.baseline, folder)
        return
    options = ["--steps", "2000", *options]  # the last one counts
    path = folder / "options.json"
    if path.exists() and json.loads(path.read_text()) != options:
        parser.error(f"--out {folder} has runs with other options, see {path}; name another folder")
    path.write_text(json.dumps(options))
    ways = dict.fromkeys([args.baseline, *args.ways])
    pairs = [(way, seed) for seed in range(1, args.seeds + 1) for way in ways]
    try:
        runs = [train(*pair, folder, options) for pair in pairs]
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    (folder / "paired.json").write_text(json.dumps(runs))
    show(runs, args.baseline, folder)


def show(runs: list[dict[str, Any]], baseline: str, folder: pathlib.Path) -> None:
    """Prints the table, and draws both pictures."""
    draw(runs, baseline, folder / "paired.png")
    draw_gaps(runs, baseline, folder / "gaps.png")
    print(f"\n{output.table(compare(runs, baseline))}\n\n{folder / 'paired.png'}")


if __name__ == "__main__":
    main()
