"""The command that plans memory: its rows, its words for what is wrong, and models of its user."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import runs

import fp8jax
from fp8jax import cli
from fp8jax.inspect import memory, models, subject, targets
from fp8jax.inspect.memory import advice
from fp8jax.rewrite.report import LayerRow, Report

ARGUMENTS = ["--layers=2", "--heads=2", "--width=32", "--context=16", "--vocabulary=65", "--batch=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache's folder, not the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/fp8jax/plan"


def test_a_row_for_each_combination(capsys, folder):
    options = ["--zero", "3", "--devices", "1", "4", "--recipe", "bf16"]
    assert cli.main(["plan", *ARGUMENTS, *options]) == 0
    printed = capsys.readouterr()
    table, _, advised = printed.out.partition("\n\n")
    heading, *rows = table.splitlines()
    assert heading.split()[0] == "MB" and len(rows) == 2 and printed.err == advised == ""
    assert cli.main(["plan", *ARGUMENTS, *options, "--json"]) == 0
    one, four = json.loads(capsys.readouterr().out)
    assert len(list(folder.iterdir())) == 2
    sizes = {name: int(value) for name, value in (text[2:].split("=") for text in ARGUMENTS)}
    of = subject.subject("gpt", **sizes)
    plan = memory.plan(of.model, "bf16", *of.inputs, loss=of.loss, devices=4, stage=3)
    assert four == {**plan._asdict(), "total": plan.total}
    assert (one["devices"], one["sent"]) == (1, 0) and four["weights"] < one["weights"]


def test_dimensions_follow_the_table(capsys):
    assert cli.main(["plan", *ARGUMENTS, "--recipe", "te"]) == 0
    _, _, advised = capsys.readouterr().out.partition("\n\n")
    assert advised.splitlines()[:2] == [
        "Dimensions to change:",
        "layers/qkv, layers/out, layers/up, layers/down: 32 rows: 50% of the work on tiles of 64 "
        "is wasted; take 64",
    ]


def test_progress_is_for_terminals(capsys, monkeypatch, folder):
    """One line, which each row writes over, and which is gone in the end."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert cli.main(["plan", *ARGUMENTS, "--recipe", "bf16", "--devices", "1", "2", "--no-cache"]) == 0
    shown = capsys.readouterr().err
    assert shown.split("\r\033[K") == [
        "",
        "compiling 1 of 2: bf16, ZeRO 0, 1 x device",
        "compiling 2 of 2: bf16, ZeRO 0, 2 x device",
        "",
    ]
    assert not folder.exists()


@pytest.mark.parametrize(
    "options, less, more",
    [
        (["--lora-rank", "4"], "moments", None),
        (["--experts", "4", "--top-k", "1"], None, "weights"),
    ],
)
def test_adapters_and_experts_are_planned(options, less, more, capsys):
    found = []
    for extra in ([], options):
        assert cli.main(["plan", *ARGUMENTS, "--recipe", "bf16", "--json", *extra]) == 0
        found += json.loads(capsys.readouterr().out)
    plain, other = found
    assert less is None or other[less] < plain[less]
    assert more is None or other[more] > 2 * plain[more]


def product_of(*sizes):
    """The report of one layer in FP8 whose product has these sizes."""
    return Report("te", (LayerRow("up", "Dense", sizes[1:], True, "", gemm=sizes),), 1)


@pytest.mark.parametrize(
    "sizes, says",
    [
        ((4096, 1024, 50304), []),
        ((64, 192 + 64, 64), []),
        (
            (4096, 1000, 1024),
            [
                "up: 1000 inputs: no multiple of 16, so XLA pads copies to 1008, 2% of the work on tiles of "
                "128 is wasted; take 896 or 1024"
            ],
        ),
        (
            (4096, 50257, 1024),
            ["up: 50257 inputs: no multiple of 16, so XLA pads copies to 50272; take 50176 or 50304"],
        ),
        ((48, 1024, 1024), ["up: 48 rows: 25% of the work on tiles of 64 is wasted; take 64"]),
        (
            (4096, 1024, 160),
            ["up: 160 outputs: 38% of the work on tiles of 128 is wasted; take 128 or 256"],
        ),
    ],
)
def test_dimensions_that_cost_are_told(sizes, says):
    assert advice.advise(product_of(*sizes)) == says


def test_advice_for_other_formats_and_experts():
    """The advice names only changes that are possible."""
    report = product_of(100, 100, 100)
    assert advice.advise(report._replace(rows=(report.rows[0]._replace(fp8=False),))) == []
    [rows, *_] = advice.advise(report._replace(rows=(report.rows[0]._replace(kind="ExpertDense"),)))
    assert rows.startswith("up: 100 rows of a block") and rows.endswith("; take more tokens for each expert")


RAISING = """
    import flax.linen as nn, jax
    class Model(nn.Module):
        def __call__(self, x):
            raise KeyError("rope")
    def model():
        return Model(), jax.ShapeDtypeStruct((2, 2), "float32")
    def now():
        1 / 0
"""


@pytest.mark.parametrize(
    "options, says",
    [
        (["--model", "gpt-8b"], "expected gpt, gpt-125m"),
        (["--model", "nowhere:model"], "No module named 'nowhere'"),
        (["--model", "json:dumps_"], "has no attribute 'dumps_'"),
        (["--model", "os:getcwd"], "expected os:getcwd to return (model, inputs)"),
        (["--width", "33", "--heads", "2"], "no multiple of `heads`"),
        (["--batch", "0"], "expected positive sizes"),
        (["--top-k", "1"], "`top_k`: expected with `experts`"),
        (["--lora-rank", "0"], "`rank`: expected a positive integer"),
        (["--recipe", "O4"], "expected one of fp32"),
        (["--zero", "4", "--devices", "2"], "`stage`: expected 0, 1, 2 or 3"),
        (["--target", "h300"], "`target`: expected one of h100"),
        (["--devices", "0"], "argument --devices: expected 1 to 1024; got 0"),
        (["--devices", "1", "9"], "`devices`: expected at most 8, as this process has; got 9"),
        (["--batch", "99999999999999999999"], "--batch: expected a whole number below 2147483648; got '999"),
        (["--layers", "many"], "--layers: expected a whole number below 2147483648; got 'many'"),
        (["--model", ":"], "expected a function package.module:function; got ':'"),
        (["--model", "raising:now"], "'raising:now', which raised ZeroDivisionError: division by zero"),
        (["--model", "raising:model"], "--model raising:model: KeyError: 'rope'"),
        (["--model", "raising:now", "--layers", "3"], "--layers is of a gpt, and raising:now has its own"),
        (["--recipe"], "fp8jax plan: argument --recipe: expected at least one argument; fp8jax plan --help"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(options, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raising.py").write_text(textwrap.dedent(RAISING))
    assert runs.status_of(["plan", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def command(*args, cwd=None):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=cwd)


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_the_help_says_every_default(command, capsys):
    assert runs.status_of([command, "--help"]) == 0
    _, *options = re.split(r"\n  (?=--)", capsys.readouterr().out)
    switches = ("--compile", "--json")
    without = [text.split()[0] for text in options if "default" not in text and not text.startswith(switches)]
    assert len(options) > 13 and without == []
    for name, size in models.GPTS["gpt-125m"].items():  # the default
        [text] = [" ".join(text.split()) for text in options if text.startswith(f"--{name} ")]
        assert f"(default {size}, or as the model's name says)" in text


def test_the_version(capsys):
    assert runs.status_of(["--version"]) == 0
    assert capsys.readouterr().out == f"fp8jax {fp8jax.__version__}\n"


@pytest.mark.parametrize(
    "returned, weights",
    [("nn.Dense(64), x", 32 * 64 + 64), ("lambda w, x: x @ w, (w, x)", 32 * 64)],
    ids=["linen", "function"],
)
def test_a_users_model_is_planned_where_it_is(returned, weights, tmp_path):
    source = f"""
        import flax.linen as nn
        import jax, jax.numpy as jnp
        def tiny():
            w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (8, 32)))
            return {returned}
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    run = command(
        "-m", "fp8jax.cli", "plan", "--model", "mine:tiny", "--json", "--recipe", "bf16", cwd=tmp_path
    )
    assert json.loads(run.stdout)[0]["weights"] == 4 * weights, run.stderr


@pytest.mark.parametrize(
    "command",
    [["plan", "--no-cache"], ["estimate", "--target", "h200"], ["doctor", "--compile"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "returned",
    ['fp8jax.transform(nn.Dense(64), "fp8"), x', 'fp8jax.transform(lambda w, x: x @ w, "fp8"), (w, x)'],
    ids=["linen", "function"],
)
def test_a_transformed_model_has_a_recipe(returned, command, tmp_path, monkeypatch, capsys):
    source = f"""
        import flax.linen as nn, fp8jax
        import jax, jax.numpy as jnp
        def tiny():
            w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (32, 32)))
            return {returned}
    """
    if command[0] == "estimate" and targets.why_not():
        pytest.skip(str(targets.why_not()))
    (tmp_path / "its_own.py").write_text(textwrap.dedent(source))
    monkeypatch.delitem(sys.modules, "its_own", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for options in ([], ["--recipe", "fp8"]):
        assert runs.status_of([*command, "--model", "its_own:tiny", *options]) == 0
        shown = capsys.readouterr().out
        assert "fp8" in shown and "bf16" not in shown, shown
    assert runs.status_of([*command, "--model", "its_own:tiny", "--recipe", "bf16"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "expected a plain module for the recipe bf16; got one transformed with fp8." in error


def test_the_cpu_is_taken_for_as_many_devices_as_asked(tmp_path):
    options = ["--json", "--recipe", "bf16", "--zero", "3", "--devices", "1", "6"]
    run = command("-m", "fp8jax.cli", "plan", *ARGUMENTS, "--width=24", *options, cwd=tmp_path)
    one, six = json.loads(run.stdout)
    assert six["devices"] == 6 and six["moments"] < one["moments"] / 5, run.stderr


@pytest.mark.long
@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
def test_the_largest_gpt_is_planned(capsys):
    options = ["--recipe=O2", "--zero=3", "--devices=512", "--target=h200"]
    assert cli.main(["plan", "--model=gpt-175b", *options]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("O2  ")
