"""The command that plans memory: its rows, its words for what is wrong, and models of its user."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from fp8jax import cli, memory
from fp8jax.memory import subject

ARGUMENTS = ["--layers=2", "--heads=2", "--width=32", "--context=16", "--vocabulary=65", "--batch=2"]


def test_the_command_prints_a_row_for_each_combination(capsys):
    options = ["--zero", "3", "--devices", "1", "4"]
    assert cli.main(["plan", *ARGUMENTS, *options, "--recipe", "te", "O2"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "MB" and len(rows) == 4
    assert cli.main(["plan", *ARGUMENTS, *options, "--json", "--recipe", "O2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data) == 2
    sizes = {name: int(value) for name, value in (text[2:].split("=") for text in ARGUMENTS)}
    of = subject.subject("gpt", **sizes)
    assert (
        data[-1]["total"] == memory.plan(of.model, "O2", *of.inputs, loss=of.loss, devices=4, stage=3).total
    )


@pytest.mark.parametrize(
    "options, says",
    [
        (["--model", "gpt-8b"], "expected gpt, gpt-125m"),
        (["--model", "nowhere:model"], "No module named 'nowhere'"),
        (["--model", "json:dumps_"], "has no attribute 'dumps_'"),
        (["--model", "os:getcwd"], "expected os:getcwd to return (model, inputs)"),
        (["--width", "33", "--heads", "2"], "no multiple of `heads`"),
        (["--batch", "0"], "expected positive sizes"),
        (["--recipe", "O4"], "expected one of fp32"),
        (["--zero", "4", "--devices", "2"], "`stage`: expected 0, 1, 2 or 3"),
        (["--target", "h300"], "`target`: expected one of h100"),
    ],
)
def test_the_command_says_what_is_wrong(options, says, capsys):
    assert cli.main(["plan", *options]) == 2
    assert says in capsys.readouterr().err


def command(*args, cwd=None):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=cwd)


def test_a_users_model_is_planned_where_it_is(tmp_path):
    source = """
        import flax.linen as nn
        import jax, jax.numpy as jnp
        def tiny():
            return nn.Dense(64), jax.ShapeDtypeStruct((8, 32), jnp.float32)
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    run = command(
        "-m", "fp8jax.cli", "plan", "--model", "mine:tiny", "--json", "--recipe", "bf16", cwd=tmp_path
    )
    assert json.loads(run.stdout)[0]["weights"] == 4 * (32 * 64 + 64), run.stderr


def test_the_largest_gpt_is_planned_without_a_device():
    code = """
        import time
        from jax._src import xla_bridge
        from fp8jax import cli
        start = time.process_time()
        cli.main(["plan", "--model=gpt-175b", "--recipe=O2", "--zero=3", "--devices=512", "--target=h200"])
        print(time.process_time() - start, xla_bridge.backends_are_initialized())
    """
    run = command("-c", textwrap.dedent(code))
    *_, row, last = run.stdout.splitlines()
    seconds, is_initialized = last.split()
    assert row.startswith("O2"), run.stderr
    assert float(seconds) < 20 and is_initialized == "False"
