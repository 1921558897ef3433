"""The precision chart, read back from programs, equals the one that is declared; and what breaks it shows."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest
import runs

from fp8jax import Recipe, adapters, optim
from fp8jax.inspect import chart, targets
from fp8jax.recipe import PRESETS

# As in the README; moments are Adam's first and second. The second column is what has a scale in the GEMMs.
NEAREST = "nearest + nearest + value"
HISTORY = "tensor, history"
OURS = "value_and_grad"
CHART = {
    "fp32": ("FP32", "-", "FP32", "FP32", "-", "FP32", "FP32 + FP32", NEAREST, "FP32", "nothing"),
    "bf16": ("BF16", "-", "FP32", "FP32", "-", "FP32", "FP32 + FP32", NEAREST, "BF16 / FP32", "nothing"),
    "fp16_amp": ("FP16", "-", "FP32", "FP32", "-", "FP32", "FP32 + FP32", NEAREST, "FP16 / FP32", OURS),
    "te": ("FP8", HISTORY, "FP32", "FP32", "-", "FP32", "FP32 + FP32", NEAREST, "FP32 / FP8", "state"),
    "O1": ("FP8", HISTORY, "FP8", "FP16", "-", "FP8", "FP32 + FP32", NEAREST, "FP32 / FP8", OURS),
    "O2": ("FP8", HISTORY, "FP8", "FP16", "-", "FP8", "FP8 + FP16", NEAREST, "FP32 / FP8", OURS),
    "O3": ("FP8", HISTORY, "FP8", "FP8", "FP16", "FP8", "FP8 + FP16", NEAREST, "FP32 / FP8", OURS),
    "te+O2": ("FP8", HISTORY, "FP8", "FP16", "-", "FP8", "FP8 + FP16", NEAREST, "FP32 / FP8", OURS),
    "fp8": (
        "FP8",
        HISTORY,
        "FP8",
        "FP16",
        "-",
        "FP8",
        "FP8 + FP16",
        "stochastic + kahan + root",
        "FP32 / FP8",
        OURS,
    ),
    "block": (
        "FP8",
        "128x128 FP32 / 1x128 FP32",
        "FP32",
        "FP32",
        "-",
        "FP32",
        "FP32 + FP32",
        NEAREST,
        "FP32 / FP8",
        "nothing",
    ),
    "mxfp8": (
        "FP8",
        "1x32 E8M0",
        "FP32",
        "FP32",
        "-",
        "FP32",
        "FP32 + FP32",
        NEAREST,
        "FP32 / FP8",
        "nothing",
    ),
    "nvfp4": (
        "FP4",
        "16x16 E4M3 / 1x16 E4M3",
        "FP32",
        "FP32",
        "-",
        "FP32",
        "FP32 + FP32",
        NEAREST,
        "FP32 / FP4",
        "state",
    ),
}


def formats(row):
    return tuple(cell.formats for cell in row.cells.values())


def test_the_table_has_every_level():
    assert list(CHART) == list(PRESETS)


SHORT = ("te", "O3", "fp8", "nvfp4")  # the others share their columns


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CHART]
)
def test_what_a_cpu_is_given_is_the_chart(name):
    row = chart.measure(name, devices=8)
    assert formats(row) == CHART[name] == tuple(cell.declared for cell in row.cells.values())
    assert row.recipe == name and not row.differences
    assert row.backend == {"block": "pallas", "mxfp8": "cudnn", "nvfp4": "cudnn"}.get(
        name, "xla" if "FP8" in CHART[name][0] else "-"
    )
    assert all(cell.evidence for cell in row.cells.values())


@pytest.mark.parametrize("name", [pytest.param("fp16_amp", marks=pytest.mark.long), "O3"])
def test_what_a_gpu_would_run_is_the_chart(name):
    if reason := targets.why_not():
        pytest.skip(reason)
    row = chart.measure(name, target="h200", devices=8)
    *stored, residuals, needs = CHART[name]
    activations = residuals.replace("FP16 / FP32", "BF16 / FP16").replace("FP32", "BF16")
    assert formats(row) == (*stored, activations, needs) and not row.differences
    library = "cublaslt_f8" if CHART[name][0] == "FP8" else "cublaslt"
    assert row.cells["gemm"].evidence.endswith(library)


# One change to a train step per column, none of which a recipe knows about.
BREAKS = {
    "gemm": ("O2", "transform", {"override_linear_precision": (False, False, True)}),
    "scaling": ("O2", "transform", {"scaling": "current"}),
    "comm": ("O2", "transform", {"comm": "FP32"}),
    "weight": ("O2", "transform", {"weight": "FP32"}),
    "master_weight": ("O3", "adamw", {"master_weight": "FP32"}),
    "weight_grad": ("O2,comm=FP32", "transform", {"weight_grad": "FP32"}),
    "moments": ("O2", "adamw", {"moments": ("FP32", "FP32")}),
    "rounding": ("fp8", "adamw", {"rounding": ("stochastic", "stochastic", "root")}),
    "residuals": ("te", "transform", {"gemm": "BF16"}),
    "needs": ("te", "transform", {"scaling": "current"}),
}
# The columns that change, too.
MORE = {"gemm": ["residuals"], "needs": ["scaling"], "residuals": ["gemm", "scaling", "needs"]}


@pytest.mark.parametrize("column", BREAKS)
def test_a_cell_that_is_broken_on_purpose_shows(column, monkeypatch):
    name, part, changes = BREAKS[column]
    broken = dataclasses.replace(Recipe.parse(name), **changes)
    transform, adamw = adapters.transform, optim.adamw
    replacement = {
        "transform": (adapters, lambda model, recipe, **options: transform(model, broken, **options)),
        "adamw": (optim, lambda rate, recipe, **options: adamw(rate, broken, **options)),
    }
    room, function = replacement[part]
    monkeypatch.setattr(room, part, function)
    row = chart.measure(name, devices=8)
    assert sorted(row.differences) == sorted([column, *MORE.get(column, [])])
    assert f"(declared {row.cells[column].declared})" in chart.table([row])


@pytest.mark.parametrize(
    "recipe, scaling",
    [
        ("te,scaling=current", "tensor"),
        ("nvfp4,fp4_options=hadamard", "1x16 E4M3"),
        ("nvfp4,fp4_options=46+eden", "1x16 E4M3"),
        ("mxfp8+O2", "1x32 E8M0"),
    ],
)
def test_scaling_is_read_back(recipe, scaling):
    assert chart.measure(recipe, devices=2).cells["scaling"][:2] == (scaling, scaling)


@pytest.mark.parametrize(
    "recipe, what, residuals, saved",
    [
        ("te", "none", "FP32 / FP8", ""),  # gelu's residuals are JAX's
        ("te", "full", "FP32", "4.0"),
        ("te", "dots", "FP32", "20.0"),
        ("te", "fp8", "FP32 / FP8", "9.0"),
        ("O2", "dots_fp8", "FP32 / FP8", "8.0"),
        ("nvfp4", "fp8", "FP32 / FP4", "6.5"),
        ("bf16", "dots_fp8_inputs", "FP8", "5.0"),
        ("te,override_linear_precision=False+False+True", "none", "FP32", ""),
    ],
)
def test_residuals_are_read_back(recipe, what, residuals, saved):
    """4 bytes for the input of a layer, 4 times as many for its first product, a quarter of that in FP8."""
    cell = chart.measure(recipe, devices=1, gradient_checkpointing=what).cells["residuals"]
    assert cell[:2] == (residuals, residuals)
    assert cell.evidence.endswith(f"{saved} bytes for each input")


def test_residuals_that_are_not_saved_show(monkeypatch):
    transform = adapters.transform
    monkeypatch.setattr(adapters, "transform", lambda model, recipe, **options: transform(model, recipe))
    row = chart.measure("te", devices=1, gradient_checkpointing="dots_fp8_inputs")
    assert str(row.cells["residuals"]) == "FP32 / FP8 (declared FP8)" and row.differences == ["residuals"]


def test_one_device_sends_nothing():
    row = chart.measure("O2", devices=1)
    assert str(row.cells["comm"]) == "-" and not row.differences


def test_a_step_of_another_block_shows(monkeypatch):
    transform = adapters.transform
    block = lambda model, recipe, **options: transform(model, "block", **options)  # noqa: E731
    monkeypatch.setattr(adapters, "transform", block)
    row = chart.measure("mxfp8", devices=2)
    assert str(row.cells["scaling"]) == "128x128 FP32 / 1x128 FP32 (declared 1x32 E8M0)"


def test_levels_without_gemms_on_a_gpu_are_left_out():
    lacking = {target: chart.lacking(target) for target in (None, "h200", "b200")}
    assert [list(each) for each in lacking.values()] == [[], ["mxfp8", "nvfp4"], []]
    assert "need 10.0; use the recipe block or te" in lacking["h200"]["mxfp8"]


def test_too_many_devices_and_unknown_names_raise():
    with pytest.raises(ValueError, match=f"`devices`: expected at most {len(jax.devices())}"):
        chart.measure("te", devices=1000)
    with pytest.raises(ValueError, match="`target`: expected one of h100"):
        chart.measure("te", target="h300")
    with pytest.raises(ValueError, match="expected one of fp32"):
        chart.measure("O4")


@pytest.mark.parametrize(
    "args, says",
    [
        (["--devices", "0"], "argument --devices: expected 1 to 1024; got 0"),
        (["O2", "O4"], "expected one of fp32"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_compiled(args, says, capsys, monkeypatch):
    monkeypatch.setattr(chart, "measure", None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # devices are there, so it would raise
    assert runs.status_of(["chart", *args]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("fp8jax chart: ") and says in line


@pytest.mark.parametrize(
    "file, says",
    [
        ("/nowhere/chart.png", "No such file or directory: '/nowhere/chart.png'"),
        ("chart.docx", "Format 'docx' is not supported"),
    ],
)
def test_the_chart_shows_though_its_picture_cannot_be_drawn(file, says, capsys, monkeypatch):
    row = chart.measure("bf16", devices=1)
    monkeypatch.setattr(chart, "measure", lambda *_, **__: row)
    assert runs.status_of(["chart", "bf16", "--png", file]) == 2
    printed = capsys.readouterr()
    assert chart.text([row]) in printed.out
    [line] = printed.err.splitlines()
    assert line.startswith("fp8jax chart: ") and says in line


def command(*args):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "fp8jax.cli", *args], capture_output=True, text=True, env=env
    )


def test_the_command_prints_json_and_draws(tmp_path):
    done = command("chart", "te", "bf16", "--devices", "2", "--json", "--png", str(tmp_path / "chart.png"))
    assert done.returncode == 0, done.stderr
    rows = {row["recipe"]: row for row in json.loads(done.stdout)}
    assert {name: row["backend"] for name, row in rows.items()} == {"te": "xla", "bf16": "-"}
    for name, row in rows.items():
        for column, expected in zip(chart.COLUMNS, CHART[name], strict=True):
            assert row[column]["declared"] == row[column]["formats"] == expected
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_a_table_and_on_demand_its_evidence():
    # The chart has no word for a recipe that leaves one of three GEMMs wide.
    recipe = "te,override_linear_precision=False+False+True"
    done = command("chart", recipe, "--devices", "2", "--evidence")
    assert done.returncode == 1
    short, lines = command("chart", recipe, "--devices", "2").stdout, done.stdout.splitlines()
    assert short.splitlines() == lines[:4] and lines[3].startswith("read from a train step compiled for 2 x")
    headings = "recipe GEMM scaling comm weight master weight gradient moments rounding residuals needs"
    assert lines[0].split() == [*headings.split(), "backend"]
    assert "FP32 / FP8 (declared FP8)" in lines[1]
    assert any("f8e4m3fn x f8e4m3fn dot" in line for line in lines)


@pytest.mark.parametrize(
    "args, message", [(("O4",), "expected one of fp32"), (("te", "--target", "h300"), "h100")]
)
def test_the_command_says_what_is_wrong_in_one_line(args, message):
    done = command("chart", *args)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
