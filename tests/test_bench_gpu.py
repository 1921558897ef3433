"""The measurement of a GPU runs, here in small on a CPU, and judges as it should."""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import pytest

from fp8jax import backends

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = str(ROOT / "examples/bench/gpu.py")


@pytest.fixture
def gpu(load_program):
    return load_program("examples/bench/gpu.py")


def dry_run(folder, *arguments):
    """The record of a dry run, and what it printed."""
    command = [sys.executable, PROGRAM, "--device", "cpu", "--tiny", "--record", str(folder), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [record] = folder.iterdir()
    return record, json.loads((record / "result.json").read_text()), run.stdout


@pytest.mark.long
def test_the_dry_run_leaves_a_whole_record(gpu, tmp_path):
    record, kept, said = dry_run(tmp_path, "--minutes", "30")
    assert record.name.endswith("_gpu_tiny")
    assert {path.name for path in record.iterdir()} == {"result.json", "table.md"}
    about = kept["environment"]
    assert about["command"].startswith("python examples/bench/gpu.py --device cpu --tiny")
    assert about["jax"] == jax.__version__
    assert {"date", "device", "commit", "python", "jaxlib", "flax", "torch", "transformer_engine"} <= set(
        about
    )

    assert list(kept["sections"]) == list(gpu.SECTIONS)
    for name, found in kept["sections"].items():
        assert found["errors"] == "", name
        assert found["tables"] and all(found["tables"].values()), name
    [checks] = kept["sections"]["correctness"]["tables"].values()
    assert len(checks) >= 14 and all(check["held"] for check in checks)
    ways = {row["way"] for rows in kept["sections"]["gemm"]["tables"].values() for row in rows}
    ours = {
        "fp8jax",
        "fp8jax, kernel (k, n)",
        "block",
        "block, weight gradient",
        "mxfp8",
        "nvfp4",
        "block, least speed / the FP8 GEMM's",
    }
    assert gpu.TILINGS[0] == "x".join(map(str, backends.pallas.TILING))
    tilings = {f"block {tiling}" for tiling in gpu.TILINGS[1:]}
    assert ways == {"bf16", "torch._scaled_mm", *ours, *tilings}
    for name in ("block", "mxfp8", "nvfp4"):
        assert sum(check["what"].startswith(f"{name}") for check in checks) == 7
    [layers] = kept["sections"]["layer"]["tables"].values()
    assert {row["way"] for row in layers} >= {"bf16", "fp8jax te", "fp8jax te,scaling=current"}
    # What could not be measured is said with its reason.
    through_te = kept["sections"]["TransformerEngine"]
    [layers] = through_te["tables"].values()
    assert through_te["skipped"].keys() | {row["way"] for row in layers} >= {
        "fp8jax te through TransformerEngine",
        "TransformerEngine current",
    }
    [learned] = kept["sections"]["convergence"]["tables"].values()
    assert len({row["steps"] for row in learned}) == 1

    page = (record / "table.md").read_text()
    assert len(kept["targets"]) == len(gpu.TARGETS)
    for line in kept["targets"]:
        assert line["measured"] is not None and math.isfinite(line["measured"])
        assert line["verdict"] == "not judged: a dry run"
        assert line["target"] in page and line["target"] in said
    assert all(f"## {name}," in page for name in gpu.SECTIONS)


def test_a_section_alone(tmp_path):
    _, kept, _ = dry_run(tmp_path, "--only", "gemm")
    small, *_ = kept["sections"]["gemm"]["tables"].values()
    assert [row["way"] for row in small][:2] == ["bf16", "fp8jax"]
    verdicts = {line["target"]: line["verdict"] for line in kept["targets"]}
    assert verdicts["GPT-124M, validation loss, O2 - bf16"] == "not run: the section was left out"


def arguments(device="cpu"):
    return argparse.Namespace(device=device, tiny=True, data="")


def test_a_section_that_is_late_is_killed(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)
    begun = time.time()
    found = gpu.run(gpu.Section(1, "gemm"), arguments(), 0.0, str(tmp_path))
    assert time.time() - begun < 30
    assert found["skipped"] == {"the section": "it was late and was killed"} and found["tables"] == {}


def test_a_late_gemm_loses_one_size(load_program, tmp_path, monkeypatch):
    gemm = load_program("examples/bench/gemm.py")

    def rows(size, *rest):
        if size != min(gemm.TINY):
            raise KeyboardInterrupt
        return [{"way": "block", "fp8jax /": 0.8}], {}

    monkeypatch.setattr(gemm, "rows", rows)
    monkeypatch.setattr(sys, "argv", ["gemm.py", "--tiny", "--record", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        gemm.main()
    [record] = tmp_path.glob("*/*")
    assert list(json.loads(record.read_text())["results"]) == ["GEMM 32 x 32 x 32"]


def test_gemms_are_profiled_before_the_next_size(load_program, tmp_path, monkeypatch):
    """The operands of a size fill the GPU, so the next size begins without them."""
    gemm, kept = load_program("examples/bench/gemm.py"), []

    def rows(size, *rest):
        assert all(ref() is None for ref in kept)
        run = lambda: size  # noqa: E731
        kept.append(weakref.ref(run))
        return [{"way": "block", "fp8jax /": 0.8}], {"block": run}

    monkeypatch.setattr(gemm, "rows", rows)
    monkeypatch.setattr(gemm.kernels, "kernels_of", lambda run, folder: [{"kernel": f"of {run()}"}])
    command = ["gemm.py", "--tiny", "--record", str(tmp_path), "--profile", str(tmp_path / "profile")]
    monkeypatch.setattr(sys, "argv", command)
    gemm.main()
    [record] = tmp_path.glob("*/result.json")
    results = json.loads(record.read_text())["results"]
    assert len(kept) == 2 and results["kernels of block at 32, 3 runs"] == [{"kernel": "of 32"}]

    def fails(run, folder):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(gemm.kernels, "kernels_of", fails)
    gemm.main()
    assert json.loads(record.read_text())["skipped"] == {"kernels": "RuntimeError: no profiler"}


def test_a_late_section_keeps_what_it_said(gpu, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import sys, time; print('compiling', file=sys.stderr, flush=True); time.sleep(99)"
    )
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "GRACE_S", 3)
    assert gpu.run(gpu.Section(1, "slow"), arguments(), 0.0, str(tmp_path))["errors"] == "compiling\n"


def test_choices_of_kernels_are_not_shared_with_timed_sections(gpu, tmp_path, monkeypatch):
    """XLA times kernels to choose, which another section on the same GPU disturbs."""
    (tmp_path / "said.py").write_text("import os, sys; sys.exit(os.environ['JAX_COMPILATION_CACHE_DIR'])")
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    sections = [gpu.Section(1, "said", is_timed=is_timed) for is_timed in (True, False)]
    said = {gpu.run(section, arguments(), 9.0, str(tmp_path))["errors"].strip() for section in sections}
    assert said == {str(tmp_path / "timed"), str(tmp_path / "untimed")}


def test_a_section_that_fails_is_noted(gpu, tmp_path):
    found = gpu.run(gpu.Section(1, "gemm", ("--rounds", "many")), arguments(), 60.0, str(tmp_path))
    assert found["skipped"] == {"the section": "its process ended with status 2"}
    assert "invalid int value: 'many'" in found["errors"]


def test_a_cpu_is_not_judged_as_a_gpu(gpu, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.ENVIRONMENT, "JAX_PLATFORMS", "cpu")
    found = gpu.run(gpu.Section(1, "gemm"), arguments("gpu"), 60.0, str(tmp_path))
    assert found["skipped"] == {"the section": "JAX found no GPU"} and found["tables"] == {}


def test_targets_are_held_or_missed(gpu):
    def section(rows, **skipped):
        return {"tables": {"": rows}, "skipped": skipped}

    found = {
        "gemm": section([{"way": "bf16", "torch /": 0.1}, {"way": "fp8jax", "torch /": 0.9}]),
        "optimizer": section([{"way": "O2", "/ optax.adamw": 0.61}]),
        "convergence": section([{"level": "O2", "- bf16": -0.2}]),
        "correctness": section([{"what": "Dense step: FP8 GEMMs in the program", "measured": 2}]),
        "layer": section([], te="it was late"),
    }
    rows = {row["target"]: row for row in gpu.judge(found, True)}
    verdicts = [
        (row["bound"], row["verdict"]) for row in rows.values() if not row["verdict"].startswith("not run")
    ]
    assert verdicts == [("3", "missed"), (">= 0.9", "held"), ("<= 0.6", "missed"), ("<= 0.01", "held")]
    assert rows["transformer layer, te, time / bf16"]["verdict"] == "not run: it was late"


def test_checks_see_a_wrong_kernel(load_program, monkeypatch):
    """A kernel that drops a NaN, and a GEMM whose last row has another scale."""
    products = load_program("examples/bench/products.py")
    both = products.here_and_there
    assert all(row["held"] for row in (*products.computed(True), *products.tails(True)))

    def without_nan(here, there, *args):
        return both(lambda *args: here(*map(jnp.nan_to_num, args)), there, *args)

    def scaled(here, there, *args):
        return both(lambda *args: here(*args).at[:, -1].multiply(2), there, *args)

    monkeypatch.setattr(products, "here_and_there", without_nan)
    assert [row["what"].split()[0] for row in products.computed(True) if not row["held"]] == ["relu"]
    monkeypatch.setattr(products, "here_and_there", scaled)
    assert not any(row["held"] for row in products.tails(True))


def test_ratios_are_of_rounds(load_program):
    """A machine that slows down threefold after the first round changes no ratio."""
    clock = load_program("examples/bench/clock.py")
    times = {"a": [1.0, 3.0, 3.3], "b": [2.0, 6.0, 6.6], "c": [1.0]}
    assert clock.ratio(times, "b", "a") == pytest.approx(2)
    assert clock.ratio(times, "b", "d") is None
    assert clock.row(times, "c") == {"ms": 1e3, "lower": 1e3, "upper": 1e3, "rounds": 1}
    turns = []
    taken = clock.take_turns({name: lambda name=name: turns.append(name) or 1.0 for name in "ab"}, rounds=3)
    assert turns == list("abbaab") and taken == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_second_record_of_a_day_has_a_folder_of_its_own(gpu, tmp_path):
    for expected in ("a", "a_2", "a_3"):
        folder = gpu.free_folder(tmp_path, "a")
        assert folder.name == expected
        folder.mkdir()


def test_without_a_gpu_it_says_so(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "gpu", lambda query: "")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "--device cpu --tiny is the dry run" in capsys.readouterr().err


def test_sections_without_times_run_side_by_side(gpu):
    assert gpu.groups_of(["layer", "correctness", "gemm", "convergence"]) == [
        ["correctness", "convergence"],
        ["layer"],
        ["gemm"],
    ]
    assert gpu.groups_of(["gemm"]) == [["gemm"]]


def test_shares_are_seconds_of_the_default_time(gpu):
    """Sections with judged figures are first, so that what is late is not judged."""
    groups = gpu.groups_of(list(gpu.SECTIONS))
    shares = [max(gpu.SECTIONS[name].share for name in group) for group in groups]
    assert sum(shares) == 60 * gpu.MINUTES
    judged = {target.section for target in gpu.TARGETS}
    are_judged = [bool(judged & set(group)) for group in groups]
    assert are_judged == sorted(are_judged, reverse=True)
    assert judged == {name for group in groups if judged & set(group) for name in group}


def test_kernels_are_summed_by_kind(load_program):
    """Two runs of four kernels: those of a kind are added, and time that no kernel fills is found."""
    kernels = load_program("examples/bench/kernels.py")
    names = ["nvjet_sm90_rqsss_128x128", "nvjet_sm90_tst_256x128", "cudnn_sdpa_flash_fprop", "_tile__6"]
    assert kernels.kind("nvjet_sm90_qqtst_256x128_128x4_1x2") == kernels.kind("block_gemm") == "FP8 GEMMs"
    found = [(name, 1000.0 * start, 500.0) for start, name in enumerate(names)]
    found[1] = (names[1], 400.0, 500.0)  # begins before the first one has ended
    rows = {row["kernel"]: row for row in kernels.table(found)}
    runs = kernels.RUNS
    assert rows["= FP8 GEMMs"]["us"] == rows["= other GEMMs"]["us"] == pytest.approx(0.5 / runs)
    assert rows["= attention"]["us"] == rows["= others"]["us"] == pytest.approx(0.5 / runs)
    assert rows[names[0]] == {"kernel": names[0], "kind": "FP8 GEMMs", "starts": 1 / runs, "us": 0.5 / runs}
    assert rows["= no kernel runs"]["us"] == pytest.approx((3500 - 1900) / runs / 1e3)
