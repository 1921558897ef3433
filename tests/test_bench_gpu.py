"""The measurement of a GPU runs, here in small on a CPU, and judges as it should."""

import json
import math
import pathlib
import subprocess
import sys
import time

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = str(ROOT / "examples/bench/gpu.py")
SECTIONS = ["correctness", "gemm", "layer", "optimizer", "GPT-350M", "GPT-124M", "convergence"]


@pytest.fixture
def parts(load_program):
    """gpu.py, whose imports are the parts."""
    return load_program("examples/bench/gpu.py")


def dry_run(folder, *arguments):
    """The record of a dry run, and what it printed."""
    command = [sys.executable, PROGRAM, "--device", "cpu", "--tiny", "--record", str(folder), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [record] = folder.iterdir()
    return record, json.loads((record / "result.json").read_text()), run.stdout


def test_the_dry_run_leaves_a_whole_record(tmp_path):
    record, kept, said = dry_run(tmp_path)
    assert record.name.endswith("_gpu_tiny")
    assert {path.name for path in record.iterdir()} == {"result.json", "table.md", "picture.png"}
    assert (record / "picture.png").read_bytes()[:4] == b"\x89PNG"
    about = kept["environment"]
    assert about["command"].startswith("python examples/bench/gpu.py --device cpu --tiny")
    assert about["jax"] == jax.__version__
    assert {"date", "device", "commit", "python", "jaxlib", "flax", "torch", "transformer_engine"} <= set(
        about
    )

    assert list(kept["sections"]) == SECTIONS
    for name, found in kept["sections"].items():
        assert found["errors"] == {}, name
        assert found["tables"] and all(found["tables"].values()), name
    [checks] = kept["sections"]["correctness"]["tables"].values()
    assert len(checks) >= 14 and all(check["held"] for check in checks)
    ways = {row["way"] for rows in kept["sections"]["gemm"]["tables"].values() for row in rows}
    assert ways == {"bf16", "fp8jax", "fp8jax, kernel (k, n)", "torch._scaled_mm"}
    [layers] = kept["sections"]["layer"]["tables"].values()
    assert {row["way"] for row in layers} >= {"bf16", "fp8jax te", "fp8jax te,scaling=current"}
    # What could not be measured is said with its reason.
    assert kept["sections"]["layer"]["skipped"].keys() | {row["way"] for row in layers} >= {
        "fp8jax te through TransformerEngine",
        "TransformerEngine current",
    }
    [learned] = kept["sections"]["convergence"]["tables"].values()
    assert len({row["steps"] for row in learned}) == 1

    page = (record / "table.md").read_text()
    assert len(kept["targets"]) == 10
    for line in kept["targets"]:
        assert line["measured"] is not None and math.isfinite(line["measured"])
        assert line["verdict"] == "not judged: a dry run"
        assert line["target"] in page and line["target"] in said
    assert all(f"## {name}," in page for name in SECTIONS)


@pytest.mark.long
def test_a_section_in_a_process_of_its_own(tmp_path):
    _, kept, _ = dry_run(tmp_path, "--only", "optimizer", "--apart")
    [rows] = kept["sections"]["optimizer"]["tables"].values()
    assert [row["way"] for row in rows] == ["optax.adamw", "O2"]
    verdicts = {line["target"]: line["verdict"] for line in kept["targets"]}
    assert verdicts["GPT-124M, validation loss, O2 - bf16"] == "not run: the section was left out"


def test_a_section_that_is_late_is_killed(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "GRACE_S", 0.5)
    path = tmp_path / "notes.json"
    given = parts.Given("cpu", True, time.time(), "")
    begun = time.time()
    parts.run_apart("gemm", given, path, str(tmp_path))
    assert time.time() - begun < 30
    found = json.loads(path.read_text())
    assert found["skipped"] == {"gemm": "it was late and was killed"}


def test_a_section_that_fails_is_noted(parts, tmp_path, monkeypatch):
    def broken(given, notes):
        notes.table("before", [{"way": "one"}])
        raise ValueError("a wrong shape\nmore")

    monkeypatch.setitem(parts.SECTIONS, "gemm", parts.Section(broken, 1))
    parts.run_section("gemm", parts.Given("cpu", True, time.time(), ""), tmp_path / "notes.json")
    found = json.loads((tmp_path / "notes.json").read_text())
    assert found["tables"] == {"before": [{"way": "one"}]}
    assert found["skipped"] == {"gemm": "failed: ValueError: a wrong shape"}
    assert "broken" in found["errors"]["gemm"]


def test_targets_are_held_or_missed(parts):
    lines = parts.record.lines
    figures = {"gemm": 0.9, "optimizer": 0.61, "convergence": -0.2, "FP8 GEMMs of a Dense step": 2}
    rows = {row["target"]: row for row in lines(figures, {"layer": "it was late"})}
    verdicts = [
        (row["bound"], row["verdict"]) for row in rows.values() if not row["verdict"].startswith("not run")
    ]
    assert verdicts == [("3", "missed"), (">= 0.9", "held"), ("<= 0.6", "missed"), ("<= 0.01", "held")]
    assert rows["transformer layer, te, speed / bf16"]["verdict"] == "not run: it was late"


def test_ratios_are_of_rounds(parts):
    """A machine that slows down threefold after the first round changes no ratio."""
    clock = parts.gemm.clock
    times = {"a": [1.0, 3.0, 3.3], "b": [2.0, 6.0, 6.6], "c": [1.0]}
    assert clock.ratio(times, "b", "a") == pytest.approx(2)
    assert clock.ratio(times, "b", "d") is None
    assert clock.row(times, "c") == {"ms": 1e3, "lower": 1e3, "upper": 1e3, "rounds": 1}
    turns = []
    taken = clock.take_turns(
        {name: lambda name=name: turns.append(name) or 1.0 for name in "ab"}, most=9, until=0
    )
    assert turns == list("abbaab") and taken == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_second_record_of_a_day_has_a_folder_of_its_own(parts, tmp_path):
    for expected in ("a", "a_2", "a_3"):
        folder = parts.record.free_folder(tmp_path, "a")
        assert folder.name == expected
        folder.mkdir()


def test_without_a_gpu_it_says_so(parts, monkeypatch, capsys):
    monkeypatch.setattr(parts.record, "gpu", lambda query: "")
    assert parts.main(["--device", "gpu"]) == 2
    assert "--device cpu --tiny is the dry run" in capsys.readouterr().err
