"""The example that compares recipes by paired runs."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def paired(load_program):
    return load_program("examples/paired.py")


def runs_of(way, losses, size=16.0):
    return [
        {"way": way, "seed": seed, "validation loss": loss, "bytes": {"weights": size}}
        for seed, loss in enumerate(losses, 1)
    ]


def test_gaps_are_those_of_a_paired_t_test(paired):
    base, other = [1.88, 1.90, 1.86, 1.87], [1.883, 1.901, 1.859, 1.875]
    first, second = paired.compare(runs_of("bf16", base) + runs_of("fp8", other, 7.0))
    assert first["gap"] is None and (second["seeds"], second["bytes"]) == (4, "7.00")
    wanted = stats.ttest_rel(other, base)
    interval = wanted.confidence_interval()
    assert second["gap"] == f"{np.mean(other) - np.mean(base):+.4f}" and second["p"] == f"{wanted.pvalue:.2f}"
    assert second["95%"] == f"{interval.low:+.4f} to {interval.high:+.4f}"


def test_the_gap_that_could_be_told_is_found_in_most_cases(paired):
    """In 80% of 2000 samples of 10 seeds, with normal differences."""
    random, found = np.random.default_rng(0), []
    for _ in range(2000):
        sample = random.normal(0, 0.003, 10)
        least = float(paired.gap(sample)["could tell"])
        test: Any = stats.ttest_1samp(random.normal(least, 0.003, 10), 0)
        found.append(test.pvalue < 0.05)
    assert 0.72 < np.mean(found) < 0.88


def test_seeds_without_a_baseline_are_left_out(paired):
    rows = paired.compare(runs_of("bf16", [1.0, 2.0]) + runs_of("fp8", [1.5, 2.5, 9.0]))
    assert rows[1]["seeds"] == 2 and rows[1]["gap"] == "+0.5000"


@pytest.mark.long
def test_the_command(tmp_path):
    """Trains, goes on where a run is missing, and leaves a record that another script can recompute."""
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(20_000)))
    small = "--steps 20 --layers 1 --width 32 --heads 2 --context 16 --batch 4 --warmup 5 --eval-interval 10"
    command = [sys.executable, str(ROOT / "examples/paired.py"), "--data", "text.txt", *small.split()]
    command += ["--ways", "fp8", "--out", "runs"]
    for seeds in ("1", "2"):
        done = subprocess.run(
            [*command, "--seeds", seeds], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("runs/*-*")) == ["bf16-1", "bf16-2", "fp8-1", "fp8-2"]
    record = json.loads((tmp_path / "runs/paired.json").read_text())
    assert [len(run["losses"]) for run in record] == [2] * 4 and (tmp_path / "runs/paired.png").stat().st_size
    losses = {(run["way"], run["seed"]): run["validation loss"] for run in record}
    gap = np.mean([losses["fp8", seed] - losses["bf16", seed] for seed in (1, 2)])
    assert f"{gap:+.4f}" in done.stdout
    for options, message in (
        (["--lr", "-1"], "has runs with other options"),
        (["--lr", "-1", "--out", "other"], "lr"),
        (["--seeds", "0"], "expected 1 or more"),
    ):
        failed = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr
