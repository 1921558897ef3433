"""The example that compares recipes by paired runs."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import runs
from scipy import stats

from fp8jax.train import TrainConfig
from fp8jax.train.step.optimizers import decays

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def paired(load_program):
    return load_program("examples/paired.py")


def runs_of(way, losses, size=16.0):
    return [
        {
            "way": way,
            "seed": seed,
            "validation loss": loss,
            "bytes": {"weights": size},
            "peak": 10**6,
            "losses": {"10": 9.0, "90": 5.0, "100": loss - 0.1},
        }
        for seed, loss in enumerate(losses, 1)
    ]


def test_gaps_are_those_of_a_paired_t_test(paired):
    base, other = [1.88, 1.90, 1.86, 1.87], [1.883, 1.901, 1.859, 1.875]
    first, second = paired.compare(runs_of("bf16", base) + runs_of("fp8", other, 7.0))
    assert first["gap"] is None and (second["seeds"], second["bytes"]) == (4, "7.00")
    wanted = stats.ttest_rel(other, base)
    interval = wanted.confidence_interval()
    assert second["gap"] == f"{np.mean(other) - np.mean(base):+.4f}" and second["p"] == f"{wanted.pvalue:.3f}"
    assert second["95%"] == f"{interval.low:+.4f} to {interval.high:+.4f}"
    assert second["training gap, 95%"] == f"{second['gap']}, {second['95%']}"  # of the last tenth alone


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


def test_runs_of_another_device_are_no_pairs(paired):
    """The same seed has another loss on another CPU."""
    here, there = ([run | {"device": name} for run in runs_of("bf16", [1.0, 2.0])] for name in ("a", "b"))
    other = [run | {"device": "b"} for run in runs_of("fp8", [1.5, 2.5])]
    there = [run | {"validation loss": run["validation loss"] + 1} for run in there]
    assert paired.compare(here + other)[1]["seeds"] == 0
    assert paired.compare(here + there + other)[1]["gap"] == "-0.5000"


def test_flashoptims_formats_against_float64(load_program):
    """The formulas of its package, 0.1.4; 1000 is no multiple of 32."""
    rivals = load_program("examples/rivals.py")
    x = np.random.default_rng(0).normal(size=1000) * np.exp2(np.random.default_rng(1).integers(-9, 9, 1000))
    x = np.float32(x)
    groups = np.pad(x.astype(np.float64), (0, 24)).reshape(-1, 32)
    largest = np.abs(groups).max(axis=1)
    share = groups / largest[:, None]
    first, second = rivals.encode(x, False), rivals.encode(np.square(x), True)
    for coded, exact in (
        (first, 127 * 2 * share / (1 + np.abs(share))),
        (second, 255 * np.abs(share)),
    ):
        # Half of a code, and float32's rounding where the exact number is halfway.
        assert np.abs(np.asarray(coded.codes, np.float64) - exact).max() < 0.5 + 1e-4
        np.testing.assert_array_equal(coded.scale, largest.astype(np.float16))
    y = np.asarray(first.codes, np.float64) / 127
    wanted = (y / (2 - np.abs(y)) * np.float16(largest)[:, None]).reshape(-1)[:1000]
    np.testing.assert_allclose(rivals.decode(first, (1000,), False), wanted, rtol=1e-6)
    root = np.asarray(second.codes, np.float64) / 255 * np.float16(largest)[:, None]
    np.testing.assert_allclose(
        rivals.decode(second, (10, 100), True), root.reshape(-1)[:1000].reshape(10, 100) ** 2, rtol=1e-6
    )
    weight, correction = rivals.split(x)
    np.testing.assert_array_equal(weight, x.astype(ml_dtypes.bfloat16))
    last_bit = 2.0 ** (np.floor(np.log2(np.abs(np.float64(weight)))) - 7)
    assert (np.abs(np.float64(rivals.joined(weight, correction)) - x) <= last_bit / 2 / 127 * 0.501).all()


def test_rivals_refuse_a_folder_that_is_there(load_program, tmp_path, capsys):
    rivals = load_program("examples/rivals.py")
    (tmp_path / "run").mkdir()
    options = ["--way", "flashoptim", "--data", runs.short_text(tmp_path), *runs.TINY]
    assert rivals.main([*options, "--out", str(tmp_path / "run")]) == 2
    assert rivals.main([*options, "--lr", "-1", "--out", str(tmp_path / "other")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("rivals: --out") and first.endswith(
        "expected a new folder; got one that is there"
    )
    assert second.startswith("rivals: --lr must be at least 0") and not (tmp_path / "other").exists()


def test_flashoptim_is_adam(load_program):
    """A step of it is optax's AdamW of the weights and moments that it stands for."""
    rivals = load_program("examples/rivals.py")
    config = TrainConfig(learning_rate=1e-2, weight_decay=0.1, adam_beta2=0.99, lr_scheduler_type="constant")
    draw = lambda seed: np.float32(np.random.default_rng(seed).normal(size=(8, 32)))  # noqa: E731
    params = {"kernel": jnp.asarray(draw(0)), "bias": jnp.asarray(draw(1)[0])}
    weights, state = rivals.flash_init(params)
    tx = optax.adamw(1e-2, 0.9, 0.99, weight_decay=0.1, mask=decays)
    plain, plain_state = jax.tree.map(rivals.joined, weights, state.correction), tx.init(params)
    for seed in range(5):
        grads = {"kernel": draw(seed + 2), "bias": draw(seed + 9)[0]}
        weights, state = rivals.flash_step(grads, state, weights, config)
        updates, plain_state = tx.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    for name, x in jax.tree.map(rivals.joined, weights, state.correction).items():
        moved = np.abs(np.asarray(plain[name]) - params[name]).mean()
        assert np.abs(np.asarray(x) - plain[name]).mean() < 0.03 * moved, name


@jax.numpy_rank_promotion("allow")  # the port has it
def test_flashoptim_is_its_port_to_jax(load_program):
    """100 steps beside the package flashoptim-jax, if it is installed. The torch package has Triton kernels
    alone, which no CPU runs."""
    port = pytest.importorskip("flashoptim_jax")
    rivals = load_program("examples/rivals.py")
    config = TrainConfig(learning_rate=1e-3, weight_decay=0.1, adam_beta2=0.99, lr_scheduler_type="constant")
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (64, 96))  # noqa: E731
    params, widths = {"kernel": draw(0) * 0.02}, jnp.exp(2 * draw(1)[0])
    weights, state = rivals.flash_init(params)
    options = {"weight_decay": 0.1, "master_weight_bits": 24, "fused": False}
    tx = port.flash_adamw(1e-3, b1=0.9, b2=0.99, eps=config.adam_epsilon, **options)
    start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    theirs, corrections = port.compression.set_fp32_params(
        params, param_template=start, master_weight_bits=24
    )
    of_theirs = tx.init(start)._replace(ecc=corrections)
    for seed in range(100):
        grads = {"kernel": (draw(seed + 2) * widths).astype(jnp.bfloat16)}
        weights, state = rivals.flash_step(grads, state, weights, config)
        theirs, of_theirs = tx.step(theirs, of_theirs, grads)
    ours = rivals.joined(weights["kernel"], state.correction["kernel"])
    gap = jnp.abs(ours - port.compression.reconstruct_weights(theirs, of_theirs.ecc)["kernel"]).mean()
    assert gap < 1e-3 * jnp.abs(ours - params["kernel"]).mean()


@pytest.mark.long
def test_the_command(tmp_path):
    """Trains, goes on where a run is missing, and leaves a record that another script can recompute."""
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(20_000)))
    small = "--steps 20 --layers 1 --width 32 --heads 2 --context 16 --batch 4 --warmup 5 --eval-interval 10"
    command = [sys.executable, str(ROOT / "examples/paired.py"), "--data", "text.txt", *small.split()]
    command += ["--ways", "fp8", "FlashOptim", "bf16 weights and Adam", "--out", "runs"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}  # a seed has the programs of another
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    for seeds in ("1", "2"):
        done = subprocess.run(
            [*command, "--seeds", seeds],
            cwd=tmp_path,
            env=os.environ | cache,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    names = ("FlashOptim", "bf16", "bf16-weights-and-Adam", "fp8")
    found = sorted(path.name for path in tmp_path.glob("runs/*-*"))
    assert found == sorted(f"{name}-{seed}" for name in names for seed in (1, 2))
    record = json.loads((tmp_path / "runs/paired.json").read_text())
    assert [len(run["losses"]) for run in record] == [2] * 8 and (tmp_path / "runs/paired.png").stat().st_size
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


def test_a_record_is_compared_again(paired, tmp_path, capsys):
    """The ways and seeds that are named; options of a training are refused."""
    runs = runs_of("bf16", [1.0, 2.0, 3.0]) + runs_of("fp8", [1.5, 2.6, 9.0]) + runs_of("te", [1.0])
    runs = [run | {"bytes": dict.fromkeys(paired.PARTS, 4.0)} for run in runs]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    command = [
        "--record",
        str(tmp_path / "runs.json"),
        "--out",
        str(tmp_path),
        *"--ways fp8 --seeds 2".split(),
    ]
    paired.main(command)
    printed = capsys.readouterr().out
    assert "+0.5500" in printed and "\nte" not in printed
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("paired.png", "gaps.png"))
    with pytest.raises(SystemExit):
        paired.main([*command, "--steps", "5"])
    assert "--record trains nothing" in capsys.readouterr().err


def test_the_page_has_the_table_of_the_record(paired):
    """The rows of docs/figures.md, computed from the runs that are kept."""
    [record] = (ROOT / "examples/records").glob("*_paired/paired.json")
    rows = paired.compare(json.loads(record.read_text()))
    page = (ROOT / "docs/figures.md").read_text()

    def interval(text):
        return text.replace("+", "").replace(" to ", ", ")

    def cells(row):
        in_training, training_interval = row["training gap, 95%"].split(", ")
        name, comma, rest = row["way"].partition(", ")
        return [
            (f"`{name}`" if name in paired.RECIPES else name) + comma + rest,
            f"{float(row['bytes']):.1f}",
            row["peak MB"],
            str(row["seeds"]),
            f"{row['loss']} ({row['base']})",
            f"{interval(row['gap'])} ({interval(row['95%'])})",
            row["p"],
            row["could tell"],
            f"{interval(in_training)} ({interval(training_interval)})",
        ]

    missing = [row["way"] for row in rows if row["gap"] and f"| {' | '.join(cells(row))} |" not in page]
    assert len(rows) >= 12 and missing == []
    to_te = {row["way"]: row for row in paired.compare(json.loads(record.read_text()), "te")}
    assert to_te["te"]["gap"] is None
    for way in ("O2", "fp8"):
        row = to_te[way]
        assert f"{interval(row['gap'])} ({interval(row['95%'])})" in page.replace("\n", " ")
