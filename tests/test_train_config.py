"""Options: their types and ranges, from Python, YAML files and the command line."""

import dataclasses
import itertools
import json
import os
import pathlib

import numpy as np
import pytest

from fp8jax import extras, train
from fp8jax.train import config
from fp8jax.train.config import option


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = option(10, "steps", least=1)
    min_lr: float = option(0.1, "rate", least=0, below=1)
    bias: bool = option(False, "biases")
    rate: float = option(1.0, "another", least=0)
    recipe: str = option("O2", "recipe")

    def __post_init__(self):
        config.validate(self)


@pytest.mark.parametrize(
    "yaml, argv, expected",
    [
        (None, [], {}),
        (None, ["--steps", "3", "--min-lr", "1e-3"], {"steps": 3, "min_lr": 1e-3}),
        (None, ["--bias"], {"bias": True}),
        (None, ["--no-bias"], {"bias": False}),
        ("{}", [], {}),
        ("steps: 5\nmin_lr: 1e-3\nbias: true\nrecipe: te", [], None),
        ("min-lr: 0", [], {"min_lr": 0.0}),
        ("steps: 5\nbias: true", ["--steps", "7"], {"steps": 7, "bias": True}),
    ],
)
def test_file_and_command_line(tmp_path, yaml, argv, expected):
    if yaml is not None:
        (tmp_path / "run.yaml").write_text(yaml)
        argv = ["--config", str(tmp_path / "run.yaml"), *argv]
    if expected is None:
        expected = {"steps": 5, "min_lr": 1e-3, "bias": True, "recipe": "te"}
    given = config.read(Settings, argv)
    assert given == expected
    assert {name: type(value) for name, value in given.items()} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--steps", "7", "--no-bias", "--config", "1"], {"steps": 7, "bias": False}),
        (["--config=1", "--steps=7", "--config", "2"], {"steps": 7, "bias": True, "recipe": "te"}),
        (["--config=2", "--config", "1"], {"steps": 1, "bias": True, "recipe": "te"}),  # the last file
    ],
)
def test_the_command_line_wins_wherever_a_file_stands(tmp_path, monkeypatch, argv, expected):
    monkeypatch.chdir(tmp_path)
    for name, more in (("1", "bias: true"), ("2", "recipe: te")):
        (tmp_path / name).write_text(f"steps: {name}\n{more}")
    assert config.read(Settings, argv) == expected


# Nine levels of nine aliases: 3 GB.
BOMB = "a: &a [" + 9 * "1, " + "]\n"
BOMB += "".join(f"{b}: &{b} [{9 * f'*{a}, '}]\n" for a, b in itertools.pairwise("abcdefghi"))


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ValueError, match="run.yaml is no file; give a YAML file"):
        config.read(Settings, ["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    "yaml, argv, says",
    [
        (None, ["--stpes", "3"], "unrecognized arguments: --stpes 3 (did you mean --steps?); --help lists"),
        (None, ["--steps", "many"], "Parser key \"steps\": Expected a <class 'int'>. Got value: many"),
        (None, ["--steps"], "argument --steps: expected one argument"),
        (None, ["stray"], "unrecognized arguments: stray; --help lists"),
        (None, ["--recipe", ""], "--recipe got an empty text; leave it out for its default"),
        (None, ["--recipe="], "--recipe got an empty text; leave it out for its default"),
        (" \n", [], "run.yaml is empty; leave it out"),
        ("stepz: 3", [], "Option 'stepz' is not accepted (did you mean --steps?)"),
        ("steps: many", [], "\"steps\": Expected a <class 'int'>. Got value: many"),
        ("steps: 1.5", [], "\"steps\": Expected a <class 'int'>. Got value: 1.5"),
        ("steps: true", [], "\"steps\": Expected a <class 'int'>. Got value: True"),
        ("min_lr: yes", [], "\"min_lr\": Expected a <class 'float'>. Got value: True"),
        ("recipe: 2", [], "\"recipe\": Expected a <class 'str'>. Got value: 2"),
        ("- steps", [], "Unexpected config: - steps"),
        ("steps: [1", [], "Problems parsing config: while parsing a flow sequence"),
        (b"\xff\xfe\x00", [], "run.yaml is no YAML: it is not UTF-8 text"),
        ("steps: 3\nbias: true\nsteps: 4", [], "says `steps` twice, again in line 3; leave one of them out"),
        ("min-lr: 0.1\nmin_lr: 0.2", [], "says `min_lr` twice"),
        (20_000 * "[", [], "run.yaml is nested deeper than 20 blocks in line 1"),
        (BOMB, [], "run.yaml has more than 10,000 values, if each alias counts as what it stands for"),
        ("steps: &a [1, *a]", [], "run.yaml has an alias *a within its own block"),
        (100_001 * " ", [], "run.yaml has 100,001 bytes; expected a YAML file of at most 100,000"),
        ("config: other.yaml", [], "run.yaml names another file; give both on the command line"),
        (None, ["--config=" + 20_000 * "["], "--config expects the path of a YAML file, not its content"),
        (None, ["--steps", 20_000 * "["], "\"steps\": Expected a <class 'int'>. Got value: [[["),
        (None, ["--config", "nowhere.yaml"], "File does not exist: "),
        (None, ["--steps", "3", "--config"], "expected one argument"),
        (None, ["--config", "steps: 3"], "--config expects the path of a YAML file, not its content"),
        (None, ["--config", "/dev/null"], "--config /dev/null is no file; give a YAML file"),
        (None, ["--steps", 5000 * "9"], "Exceeds the limit"),
        ("steps: " + 5000 * "9", [], "Exceeds the limit"),
    ],
)
def test_bad_options(tmp_path, yaml, argv, says):
    """Each is one line, which names the option, or the nearest one."""
    if yaml is not None:
        (tmp_path / "run.yaml").write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        argv = ["--config", str(tmp_path / "run.yaml")]
    with pytest.raises(ValueError) as caught:
        config.read(Settings, argv)
    assert yaml is None or "run.yaml" in str(caught.value)
    assert says in str(caught.value) and len(str(caught.value)) < 550 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values, says",
    [
        ({"steps": 0}, "--steps must be at least 1 and below 2147483648; got 0"),
        ({"min_lr": -0.1}, "--min-lr must be at least 0 and below 1; got -0.1"),
        ({"min_lr": 1.0}, "--min-lr must be at least 0 and below 1; got 1.0"),
        ({"min_lr": float("nan")}, "--min-lr must be at least 0 and below 1; got nan"),
        ({"steps": 10**24}, "--steps must be at least 1 and below 2147483648; got 1000000000000000000000000"),
        ({"rate": float("inf")}, "--rate must be at least 0 and finite; got inf"),
        ({"rate": float("nan")}, "--rate must be at least 0 and finite; got nan"),
        ({"steps": 1.5}, "--steps must be of type int; got 1.5"),
        ({"steps": True}, "--steps must be of type int; got True"),
        ({"min_lr": "0.1"}, "--min-lr must be of type float; got '0.1'"),
        ({"bias": None}, "--bias must be of type bool; got None"),
        ({"recipe": "a\0b"}, "--recipe must be printable text; got 'a\\x00b'"),
        ({"recipe": "a\udcff"}, "--recipe must be printable text; got 'a\\udcff'"),
    ],
)
def test_values_out_of_range(values, says):
    with pytest.raises(ValueError) as caught:
        Settings(**values)
    assert str(caught.value) == says


def test_numbers_of_numpy_and_paths():
    settings = Settings(steps=np.int64(3), min_lr=np.float32(0.5), rate=1, recipe=pathlib.Path("x"))
    assert (settings.steps, settings.min_lr, settings.rate) == (3, 0.5, 1)
    assert type(settings.steps) is int and type(settings.min_lr) is float  # as JSON can hold them
    saved = {"steps": 3, "min_lr": 0.5, "bias": False, "rate": 1, "recipe": "x"}
    assert config.saved_options(settings) == json.loads(json.dumps(saved)) == saved


def test_choices():
    with pytest.raises(ValueError) as caught:
        train.TrainConfig(lr_scheduler_type="cosin")
    expected = "--lr-scheduler-type must be one of constant, linear, cosine; got cosin (did you mean cosine?)"
    assert str(caught.value) == expected


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit):
        config.read(train.TrainConfig, ["--help"])
    printed = capsys.readouterr().out
    for field in dataclasses.fields(train.TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in printed


def test_options_of_one_start_are_not_saved():
    assert not config.saved_options(config.DeviceConfig(distributed=True, processes=4))
    fixed, saved = config.fixed_options(train.TrainConfig), config.saved_options(train.TrainConfig())
    assert {"seed", "recipe"} <= fixed < set(saved) and {"logging_steps", "save_steps"} <= set(saved) - fixed


def test_input_is_blamed_in_one_line():
    with pytest.raises(train.BadInput) as caught, train.blame_input():
        raise ValueError("two\n  lines")
    assert str(caught.value) == "two lines"
    with pytest.raises(TypeError), train.blame_input():
        raise TypeError("a defect stays what it is")


def test_missing_extra_is_named():
    with pytest.raises(ImportError) as caught:
        extras.need("no_such_package")
    assert str(caught.value) == f"not installed: no_such_package; {extras.install('train')}"
    assert extras.need("json") is json
    with pytest.raises(ImportError, match="not installed: no_such_package.part; run `pip install"):
        extras.need("no_such_package.part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'json.nothing'"):
        extras.need("json.nothing")  # a defect stays what it is
