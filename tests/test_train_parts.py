"""The parts of a training program, each alone: settings, text, checkpoints, scales, curves, report."""

import dataclasses
import html.parser
import json
import pathlib
import resource
import shutil
import signal
import types
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import Recipe, ScaledArray, train
from fp8jax.inspect import program
from fp8jax.quantization import UNSET
from fp8jax.train import checkpoint, config, data, figures, observe, report, rundir
from fp8jax.train.config import knob
from fp8jax.train.footprint import Footprint, Line, check_fits, footprint
from fp8jax.train.observe import Bytes, Curves, Seen, Tensor, Watched

# --- settings ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = knob(10, "steps", least=1)
    min_lr: float = knob(0.1, "rate", least=0, below=1)
    bias: bool = knob(False, "biases")
    rate: float = knob(1.0, "another", least=0)
    recipe: str = knob("O2", "recipe")

    def __post_init__(self):
        config.check_ranges(self)


@pytest.mark.parametrize(
    "yaml, argv, expected",
    [
        (None, [], {}),
        (None, ["--steps", "3", "--min-lr", "1e-3"], {"steps": 3, "min_lr": 1e-3}),
        (None, ["--bias"], {"bias": True}),
        (None, ["--no-bias"], {"bias": False}),
        ("", [], {}),
        ("steps: 5\nmin_lr: 1e-3\nbias: true\nrecipe: te", [], None),
        ("min-lr: 0", [], {"min_lr": 0.0}),
        ("steps: 5\nbias: true", ["--steps", "7"], {"steps": 7, "bias": True}),
    ],
)
def test_settings_come_from_file_and_command_line(tmp_path, yaml, argv, expected):
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
    "yaml, argv, says",
    [
        (None, ["--stpes", "3"], "unknown option --stpes (did you mean --steps?)"),
        (None, ["--steps", "many"], "--steps: invalid int value: 'many'"),
        (None, ["--steps"], "--steps: expected one argument"),
        (None, ["stray"], "unknown option stray; the options are --steps"),
        (
            "stepz: 3",
            [],
            "unknown key stepz (did you mean steps?); the keys are steps, min_lr, bias, rate, recipe",
        ),
        ("steps: many", [], "`steps` must be a whole number; got 'many'"),
        ("steps: 1.5", [], "`steps` must be a whole number; got 1.5"),
        ("steps: true", [], "`steps` must be a whole number; got True"),
        ("min_lr: yes", [], "`min_lr` must be a number; got True"),
        ("bias: 1", [], "`bias` must be true or false; got 1"),
        ("recipe: 2", [], "`recipe` must be text (in quotes); got 2"),
        ("- steps", [], "expected lines of `option: value`; got a list"),
        ("steps: [1", [], "is no YAML"),
        (b"\xff\xfe\x00", [], "cannot be read"),
        ("steps: 3\nbias: true\nsteps: 4", [], "says `steps` twice; leave one of them out"),
        ("min-lr: 0.1\nmin_lr: 0.2", [], "says `min_lr` twice"),
        ("min_lr: " + 400 * "9", [], "`min_lr` must be a number; got 9999"),
        (20_000 * "[", [], "is no YAML: maximum recursion depth exceeded"),
        (None, ["--config", ""], "--config  cannot be read"),
        (None, ["--config", "/dev/null"], "--config /dev/null cannot be read: it is a device"),
        (None, ["--steps", 5000 * "9"], "--steps: invalid int value: '999"),
    ],
)
def test_bad_settings_say_what_is_legal(tmp_path, yaml, argv, says):
    if yaml is not None:
        (tmp_path / "run.yaml").write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        argv = ["--config", str(tmp_path / "run.yaml")]
    with pytest.raises(ValueError) as caught:
        config.read(Settings, argv)
    assert says in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "values, says",
    [
        ({"steps": 0}, "--steps must be at least 1; got 0"),
        ({"min_lr": -0.1}, "--min-lr must be at least 0 and below 1; got -0.1"),
        ({"min_lr": 1.0}, "--min-lr must be at least 0 and below 1; got 1.0"),
        ({"min_lr": float("nan")}, "--min-lr must be at least 0 and below 1; got nan"),
        ({"steps": 10**24}, "--steps must be at least 1 and below 2147483648; got 1000000000000000000000000"),
        ({"rate": float("inf")}, "--rate must be at least 0 and finite; got inf"),
        ({"rate": float("nan")}, "--rate must be at least 0 and finite; got nan"),
        ({"steps": 1.5}, "--steps must be a whole number; got 1.5"),
        ({"steps": True}, "--steps must be a whole number; got True"),
        ({"min_lr": "0.1"}, "--min-lr must be a number; got '0.1'"),
        ({"bias": None}, "--bias must be true or false; got None"),
        ({"recipe": "a\0b"}, "--recipe must be UTF-8 without control characters; got 'a\\x00b'"),
        ({"recipe": "a\udcff"}, "--recipe must be UTF-8 without control characters; got 'a\\udcff'"),
    ],
)
def test_numbers_out_of_range(values, says):
    with pytest.raises(ValueError) as caught:
        Settings(**values)
    assert str(caught.value) == says


def test_numbers_of_numpy_and_paths_are_settings():
    settings = Settings(steps=np.int64(3), min_lr=np.float32(0.5), rate=1, recipe=pathlib.Path("x"))
    assert (settings.steps, settings.min_lr, settings.rate) == (3, 0.5, 1)


def test_input_is_blamed_in_one_line():
    with pytest.raises(train.BadInput) as caught, train.blame_input():
        raise ValueError("two\n  lines")
    assert str(caught.value) == "two lines"
    with pytest.raises(TypeError), train.blame_input():
        raise TypeError("a defect stays what it is")


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(train.extras, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(ImportError) as caught:
        train.extras.check()
    assert str(caught.value) == "not installed: no_such_package; run: pip install 'fp8jax[train]'"
    monkeypatch.setattr(train.extras, "PACKAGES", ("json",))
    train.extras.check()
    with pytest.raises(ImportError, match="not installed: no_such_grain;"):
        train.extras.check("no_such_grain")
    with pytest.raises(ImportError) as needed:
        train.extras.need("no_such_package.part")
    assert str(needed.value).startswith("not installed: no_such_package.part; run: pip install")
    with pytest.raises(ModuleNotFoundError, match="No module named 'json.nothing'"):
        train.extras.need("json.nothing")  # a defect stays what it is


# --- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, vocabulary",
    [
        (b"banana bandana", " abdn"),
        ("zürich\r\n".encode(), "\n\rchirzü"),
        (b"caf\xe9 \xff", " acf\xe9\xff"),  # no UTF-8: byte by byte
        ("𝔽ℙ8".encode(), "8ℙ𝔽"),
    ],
)
def test_text_round_trips(tmp_path, content, vocabulary):
    path = tmp_path / "text"
    path.write_bytes(content)
    text = data.load(str(path))
    assert text.vocabulary == vocabulary
    decoded = text.decode(text.train) + text.decode(text.validation)
    assert decoded.encode("utf-8" if b"\xff" not in content else "latin-1") == content
    assert len(text.train) == int(0.9 * len(decoded))


def test_standard_library_is_the_same_text_every_time():
    first, second = data.load(""), data.load("")
    assert first.fingerprint == second.fingerprint
    assert len(first.train) + len(first.validation) == data.LIBRARY_BYTES
    assert set(first.vocabulary) <= {chr(c) for c in range(32, 127)} | {"\n", "\N{REPLACEMENT CHARACTER}"}
    assert len(first.vocabulary) >= 90
    assert "import " in first.decode(first.validation)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: None, "no such file; give the path of a text file"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"text\0" * 50), "is a binary file, or in UTF-16"),
        (lambda path: path.write_bytes(bytes(range(1, 256)) * 9), "is a binary file, or in UTF-16"),
        (lambda path: path.symlink_to("/dev/null"), "cannot be read (it is a device)"),
    ],
)
def test_unreadable_text(tmp_path, make, says):
    path = tmp_path / "text"
    make(path)
    with pytest.raises(ValueError) as caught:
        data.load(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "size, context, too_short",
    [(9, 9, None), (10, 9, "training part has 90 characters"), (1, 10, "validation part has 10 characters")],
)
def test_too_short_text(tmp_path, size, context, too_short):
    path = tmp_path / "text"
    path.write_text("ab" * 50)
    text = data.load(str(path))
    if too_short is None:
        data.check_length(text, size, context)
        assert data.batch(text.validation, (0, "", 0), size, context).shape == (size, context + 1)
        return
    with pytest.raises(ValueError) as caught:
        data.check_length(text, size, context)
    assert too_short in str(caught.value) and "smaller --batch and --context" in str(caught.value)


def test_batches_are_windows_that_depend_on_seed_purpose_and_number():
    tokens = np.arange(500, dtype=np.uint16)
    seed = (3, "train", 7)
    batch = data.batch(tokens, seed, size=64, context=8)
    assert batch.shape == (64, 9) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch - batch[:, :1], np.broadcast_to(np.arange(9), (64, 9)))
    assert batch.min() >= 0 and batch.max() <= 499
    np.testing.assert_array_equal(batch, data.batch(tokens, seed, size=64, context=8))
    for other in ((4, "train", 7), (3, "validation", 7), (3, "train", 8)):
        assert not np.array_equal(batch, data.batch(tokens, other, size=64, context=8))


def test_every_window_can_be_drawn():
    starts = data.batch(np.arange(5), (0, "train", 0), size=200, context=2)[:, 0]
    assert set(starts.tolist()) == {0, 1, 2}


def test_windows_side_by_side_cover_all_of_a_text_that_is_not_too_long():
    tokens = np.arange(1000, dtype=np.uint16)
    batches = data.windows(tokens, size=4, context=8, most=100)
    assert {(batch.shape, batch.dtype) for batch in batches} == {((4, 9), np.dtype(np.int32))}
    seen = np.concatenate(batches)
    np.testing.assert_array_equal(seen, np.arange(124)[:, None] * 8 + np.arange(9))
    spread = np.concatenate(data.windows(tokens, size=4, context=8, most=2))[:, 0]
    np.testing.assert_array_equal(spread, np.arange(8) * 124 // 8 * 8)
    [few] = data.windows(tokens[:18], size=4, context=8, most=100)
    np.testing.assert_array_equal(few[:, 0], [0, 0, 8, 8])


# --- checkpoints ------------------------------------------------------------------------------


def make_state(seed=0):
    """One leaf of every dtype and container that a training state has."""
    values = jax.random.normal(jax.random.key(seed), (4, 8))
    arrays = {
        str(dtype): values.astype(dtype) for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn")
    }
    arrays["grad"] = values.astype(jnp.float8_e5m2)
    scaled = {"kernel": ScaledArray(values.astype(jnp.float16), jnp.full((4, 1), 0.5 + seed))}
    return [(arrays, scaled), Watched(jnp.int32(seed), jnp.float32(seed)), None, ()]


def bits(tree):
    """Every leaf as (dtype, shape, bytes)."""
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 2, 3 and 4, the newest three of four."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    for step in (1, 2, 3, 4):
        checkpoint.save(folder, step, make_state(step), {"loss": np.arange(float(step))})
    return folder


def copy_of(folder, tmp_path):
    copy = tmp_path / "copy"
    for path in folder.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(folder)).write_bytes(path.read_bytes())
    return copy


def test_checkpoint_keeps_every_bit(saved):
    found, skipped = checkpoint.newest(saved, like=make_state())
    assert found.step == 4 and skipped == []
    assert jax.tree.structure(found.state) == jax.tree.structure(make_state(4))
    assert bits(found.state) == bits(make_state(4))
    np.testing.assert_array_equal(found.history["loss"], np.arange(4.0))


def test_only_the_newest_are_kept(saved):
    assert sorted(path.name for path in saved.iterdir()) == [f"step-0000000{n}" for n in (2, 3, 4)]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [cut, flip, pathlib.Path.unlink], ids=["cut", "flip", "delete"])
def test_damage_to_any_file_is_noticed(saved, tmp_path, harm):
    files = [p.relative_to(saved) for p in sorted((saved / "step-00000004").rglob("*")) if p.is_file()]
    assert len(files) > 4
    copy = copy_of(saved, tmp_path)
    for file in files:
        before = (saved / file).read_bytes()
        if not before:
            continue
        harm(copy / file)
        found, skipped = checkpoint.newest(copy, like=make_state())
        assert found.step == 3 and len(skipped) == 1, file
        assert "step-00000004" in skipped[0] and "missing or damaged" in skipped[0]
        (copy / file).write_bytes(before)
    assert bits(found.state) == bits(make_state(3))


def test_a_checkpoint_that_was_cut_off_is_skipped_and_removed(saved, tmp_path):
    copy = copy_of(saved, tmp_path)
    (copy / "step-00000004").rename(copy / "writing-00000004")
    found, [skipped] = checkpoint.newest(copy, like=make_state())
    assert found.step == 3 and "writing-00000004: it was cut off while it was written" in skipped
    checkpoint.save(copy, 5, make_state(5), {})
    assert sorted(path.name for path in copy.iterdir()) == [f"step-0000000{n}" for n in (2, 3, 5)]


def test_a_checkpoint_is_there_while_it_is_replaced(saved, tmp_path, monkeypatch):
    copy = copy_of(saved, tmp_path)

    def dies(path, **_):
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "shutil", types.SimpleNamespace(rmtree=dies))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(copy, 4, make_state(9), {})
    found, [skipped] = checkpoint.newest(copy, like=make_state())
    assert found.step == 4 and bits(found.state) == bits(make_state(9))
    assert "writing-00000004-replaced" in skipped
    checkpoint.save(copy, 5, make_state(5), {})
    assert sorted(path.name for path in copy.iterdir()) == [f"step-0000000{n}" for n in (3, 4, 5)]


def swap(folder):
    """Step 3 under the name of step 4, and the other way round."""
    (folder / "step-00000003").rename(folder / "x")
    (folder / "step-00000004").rename(folder / "step-00000003")
    (folder / "x").rename(folder / "step-00000004")


def replaced(make):
    def harm(folder):
        (folder / "step-00000004").rename(folder.parent / "moved")
        make(folder / "step-00000004")

    return harm


@pytest.mark.parametrize(
    "harm, step, says",
    [
        (swap, 2, "it is the checkpoint of step 3 under another name"),
        (lambda folder: (folder / "step-00000004").rename(folder / "step-00000009"), 3, "of step 4 under"),
        (replaced(pathlib.Path.touch), 3, "it is no folder"),
        (replaced(pathlib.Path.mkdir), 3, "its manifest is missing or damaged"),
        (replaced(lambda path: path.symlink_to("nowhere")), 3, "it is no folder"),
        (replaced(lambda path: path.symlink_to(path.name)), 3, "it is no folder"),
        (replaced(lambda path: path.symlink_to("step-00000003")), 3, "of step 3 under another name"),
        (replaced(lambda path: path.symlink_to(path.parent.parent / "moved")), 4, None),
        (lambda folder: (folder / "step-00000004/manifest.json").write_text("{}"), 3, "its manifest is"),
        (lambda folder: (folder / "step-00000004/data.json").write_text("no JSON"), 4, None),
        (lambda folder: [(folder / name).touch() for name in ("step-x", "step-", "notes")], 4, None),
    ],
)
def test_a_checkpoint_knows_its_step_and_what_is_none_is_skipped(saved, tmp_path, harm, step, says):
    copy = copy_of(saved, tmp_path)
    harm(copy)
    found, skipped = checkpoint.newest(copy, like=make_state())
    assert found.step == step and bits(found.state) == bits(make_state(step))
    assert says is None if not skipped else says in skipped[0]
    checkpoint.save(copy, 4, make_state(7), {})
    found, _ = checkpoint.newest(copy, like=make_state())
    assert found.step == 4 and bits(found.state) == bits(make_state(7))


def test_a_checkpoint_of_another_run_is_skipped(tmp_path):
    for step, run in ((1, "this"), (2, "other")):
        checkpoint.save(tmp_path, step, make_state(step), {}, run=run)
    found, [skipped] = checkpoint.newest(tmp_path, make_state(), run="this")
    assert found.step == 1 and "it is of another run, with other settings or data" in skipped
    assert checkpoint.newest(tmp_path, make_state())[0].step == 2  # nobody asked


def test_damaged_checkpoints_of_later_steps_push_out_no_whole_one(saved, tmp_path):
    copy = copy_of(saved, tmp_path)
    for step in (3, 4):
        (copy / f"step-0000000{step}/manifest.json").unlink()
    (copy / "step-00000009").mkdir()
    checkpoint.save(copy, 1, make_state(1), {})
    assert checkpoint.newest(copy, make_state())[0].step == 2
    assert len(list(copy.iterdir())) == 5


def test_a_full_disk_is_one_line_and_leaves_the_checkpoints_before(saved, tmp_path, capfd):
    copy, limit = copy_of(saved, tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(copy.rglob("*"))
    state = [*make_state(5)[:2], jax.random.normal(jax.random.key(0), (100_000,)), ()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))  # Python has the system's signal ignored
    try:
        with pytest.raises(OSError) as caught:
            checkpoint.save(copy, 5, state, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    says = "step-00000005 cannot be written (File too large); mend that and resume: step 4 is the last that"
    assert says in str(caught.value) and len(str(caught.value)) < 400 and caught.value.__cause__ is None
    assert capfd.readouterr().err == "" and sorted(copy.rglob("*")) == before


@pytest.mark.parametrize("harm", ["damaged", "deleted", "deleted folder"])
def test_a_run_that_lost_all_its_checkpoints_begins_again_only_if_told_to(tmp_path, harm, capsys):
    assert rundir.resume(tmp_path, make_state(), "run", or_start=False) is None  # killed before its first
    assert "no checkpoint in" in capsys.readouterr().err
    for step in (1, 2):
        rundir.keep(tmp_path, step, make_state(step), {}, run="run")
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "step-00000002")
    assert rundir.resume(tmp_path, make_state(), "run", or_start=False).step == 1
    assert "the checkpoint of step 2: it was saved in" in capsys.readouterr().err
    if harm == "damaged":
        cut(folder / "step-00000001/history.npz")
    else:
        shutil.rmtree(folder / "step-00000001" if harm == "deleted" else folder)
    with pytest.raises(ValueError, match="is whole: .*; put one back, or begin at step 0 with --or-start"):
        rundir.resume(tmp_path, make_state(), "run", or_start=False)
    assert capsys.readouterr().err == ""
    assert rundir.resume(tmp_path, make_state(), "run", or_start=True) is None
    assert "so the run starts at step 0" in capsys.readouterr().err


def test_no_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing", like=make_state()) == (None, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state[:1],
        lambda state: [state[0], Watched(jnp.zeros((2,)), jnp.float32(0)), *state[2:]],
    ],
)
def test_checkpoint_of_another_model(saved, change):
    with pytest.raises(ValueError) as caught:
        checkpoint.newest(saved, like=change(make_state()))
    assert "is of another model or recipe" in str(caught.value)


# --- the run's folder -------------------------------------------------------------------------


def test_folders_are_numbered_and_never_taken_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rundir.choose("", resume=False) == pathlib.Path("runs/gpt-1")
    for name in ("gpt-2", "gpt-10", "gpt-x", "other-50"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert rundir.choose("", resume=False) == pathlib.Path("runs/gpt-11")
    (tmp_path / "runs/gpt-10/settings.json").touch()
    assert rundir.choose("", resume=True) == pathlib.Path("runs/gpt-10")
    (tmp_path / "taken").mkdir()
    assert rundir.choose("taken", resume=False) == pathlib.Path("taken")
    (tmp_path / "taken" / "settings.json").touch()
    assert rundir.choose("taken", resume=True) == pathlib.Path("taken")
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        rundir.choose("taken", resume=False)


@pytest.mark.parametrize(
    "out, resume, or_start, says",
    [
        ("", True, False, "--resume found no run in runs/gpt-1; give the --out of one, or add --or-start"),
        ("nothing", True, False, "--resume found no run in nothing"),
        ("empty", True, False, "--resume found no run in empty"),
        ("others", True, True, "--out others holds files and no run (settings.json is missing)"),
        ("others", False, False, "--out others holds files and no run (settings.json is missing)"),
        ("others/file", True, True, "--out others/file is a file"),
        ("dangling", False, False, "--out dangling is a file"),
        ("a" * 300, False, False, "cannot be read (File name too long)"),
        ("empty", False, True, "--or-start is for --resume"),
        ("", True, True, None),
        ("nothing", True, True, None),
        ("empty", True, True, None),
    ],
)
def test_a_folder_without_a_run_is_not_resumed(tmp_path, monkeypatch, out, resume, or_start, says):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "others"):
        (tmp_path / name).mkdir()
    (tmp_path / "others/file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    if says is None:
        assert rundir.choose(out, resume, or_start) == pathlib.Path(out or "runs/gpt-1")
        return
    with pytest.raises(ValueError) as caught:
        rundir.choose(out, resume, or_start)
    assert says in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "settings.json").touch()
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "checkpoints")  # root may write anywhere
    with pytest.raises(ValueError, match="checkpoints is read-only; copy it to where it can be"):
        rundir.choose(str(tmp_path), resume=True)


def test_a_run_is_resumed_with_its_own_settings_only(tmp_path):
    names = ["lr", "out", "resume", "data", "save_steps"]
    assert rundir.began(tmp_path, names) == rundir.Began({}, "")
    settings = {"lr": 0.1, "out": "a", "resume": False, "data": "x", "save_steps": 5}
    rundir.start(tmp_path, rundir.Began({}, ""), rundir.Began(settings, "text"))
    found = rundir.began(tmp_path, names)
    assert found == rundir.Began(settings, "text")
    rundir.start(tmp_path, found, rundir.Began({**settings, "lr": 0.2}, "text"))
    assert rundir.began(tmp_path, names) == found
    moved = {**settings, "out": "b", "resume": True, "data": "y", "save_steps": 50}
    rundir.check_same(tmp_path, found, rundir.Began(moved, "text"))
    with pytest.raises(ValueError, match="has --lr 0.1, not 0.2; leave --lr out"):
        rundir.check_same(tmp_path, found, rundir.Began({**moved, "lr": 0.2}, "text"))
    with pytest.raises(ValueError, match="began with other data"):
        rundir.check_same(tmp_path, found, rundir.Began(moved, "other"))
    with pytest.raises(ValueError, match="another version"):
        rundir.began(tmp_path, names[1:])
    whole = (tmp_path / "settings.json").read_text()
    for damaged in (whole[:-5], "", "[]", "3", "{}", "[" * 10**5, whole.replace("0.1", "0.3")):
        (tmp_path / "settings.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"settings.json is damaged \("):
            rundir.began(tmp_path, names)


def test_a_folder_is_given_back_by_a_run_that_does_not_compile(tmp_path):
    folder, nothing, now = tmp_path / "run", rundir.Began({}, ""), rundir.Began({"lr": 1}, "text")
    for error, remains in ((RuntimeError, False), (KeyboardInterrupt, True)):
        rundir.start(folder, nothing, now)
        with pytest.raises(error), rundir.given_back(folder, nothing):
            raise error
        assert folder.exists() == remains
    assert rundir.began(folder, ["lr"]) == now


def test_of_two_runs_that_chose_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing, first, second = (rundir.Began({"lr": lr} if lr else {}, "text") for lr in (0, 1, 2))
    folder, same = (rundir.choose("", resume=False) for _ in range(2))
    assert folder == same
    rundir.start(folder, nothing, first)
    says = "runs/gpt-1 was taken by another run meanwhile; start again, or give another --out"
    with pytest.raises(ValueError, match=says):
        rundir.start(same, nothing, second)
    assert rundir.began(folder, ["lr"]) == first


# --- stopping ---------------------------------------------------------------------------------


def test_a_signal_asks_to_stop_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGTERM)
    with train.stop.requests() as stop_asked:
        assert not stop_asked()
        signal.raise_signal(signal.SIGTERM)
        assert stop_asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_of_the_main_thread_nothing_asks_to_stop():
    def ask():
        with train.stop.requests() as stop_asked:
            return stop_asked(), signal.getsignal(signal.SIGTERM)

    with futures.ThreadPoolExecutor() as threads:
        assert threads.submit(ask).result() == (False, signal.getsignal(signal.SIGTERM))


# --- scales, bytes, curves --------------------------------------------------------------------


def scaling_state(scale, newest):
    history = np.zeros((*np.shape(scale), 4), np.float32)
    history[..., 0] = newest
    return {"scale": jnp.asarray(scale, jnp.float32), "amax_history": jnp.asarray(history)}


def variables(scale, newest):
    """Two layers: one alone, one scanned twice."""
    stacked = scaling_state([scale, scale], [newest, newest])
    return {
        "params": {},
        "_overwrite_with_gradient": {
            "h": {"fc": {"kernel": stacked}},
            "head": {"kernel": scaling_state(scale, newest)},
        },
    }


def test_saturation_compares_the_new_amax_with_the_scale_that_was_used():
    before = variables([1.0, 2.0, 0.5], [9.0, 9.0, 9.0])
    after = variables([8.0, 16.0, 32.0], [448.0, 448.0, 4 * 57344.0])
    expected = {"HYBRID": [1.0, 0.5, 8.0], "E4M3": [1.0, 0.5, 8.0 * 57344 / 448]}
    for fp8_format, ratios in expected.items():
        recipe = Recipe.parse(f"te,fp8_format={fp8_format}")
        seen = jax.jit(observe.watch, static_argnums=2)(before, after, recipe)
        np.testing.assert_allclose(seen.saturation, np.tile(ratios, 3), rtol=1e-6)
        np.testing.assert_array_equal(seen.scale, np.tile([8.0, 16.0, 32.0], 3))
    first = observe.watch(variables([UNSET] * 3, [0.0] * 3), after, Recipe.TE)
    np.testing.assert_array_equal(first.saturation, np.ones(9))
    names = observe.tensors(before)
    assert names[0] == Tensor("h/fc", "0", "input") and names[5] == Tensor("h/fc", "1", "output gradient")
    assert names[6:] == [Tensor("head", "", operand) for operand in observe.OPERANDS]


def test_nothing_is_watched_without_delayed_scales():
    plain = {"params": {"kernel": jnp.ones(3)}}
    seen = observe.watch(plain, plain, Recipe.BF16)
    assert seen.scale.shape == seen.saturation.shape == (0,) and observe.tensors(plain) == []


def test_bytes_count_every_leaf():
    kernel = ScaledArray(jnp.zeros((10, 10), jnp.float16), jnp.ones((1, 1)))
    params = {"kernel": kernel, "bias": jnp.zeros((10,), jnp.float32)}
    grads = {
        "kernel": ScaledArray(jnp.zeros((10, 10), jnp.float8_e4m3fn), jnp.ones(())),
        "bias": jnp.zeros(10),
    }
    state = {"kernel": scaling_state(np.ones(3), np.ones(3))}
    whole = {"params": params, "_overwrite_with_gradient": state}
    assert observe.parameters(whole) == 110
    count = observe.bytes_per_parameter(whole, {"params": grads}, {"mu": jnp.zeros((5,), jnp.int8)})
    np.testing.assert_allclose(
        count, np.array([200 + 4 + 40, 100 + 4 + 40, 5, 3 * 4 + 3 * 4 * 4]) / 110, rtol=1e-12
    )


def make_curves(steps=30, tensors=3):
    curves = Curves()
    for begin in range(0, steps, 10):
        watched = [
            Watched(np.full(tensors, 0.5 + i, np.float32), np.full(tensors, 0.1 * i, np.float32))
            for i in range(10)
        ]
        losses = [np.float64(4.0 - 0.1 * (begin + i)) for i in range(10)]
        curves.add([Seen(loss, 0, of_one) for loss, of_one in zip(losses, watched, strict=True)], 0.25)
    curves.validation += [(15, 3.5), (steps, 1.25)]
    return curves


@pytest.mark.parametrize("tensors", [0, 3])
def test_curves_survive_a_checkpoint(tensors):
    curves = make_curves(tensors=tensors)
    again = Curves.from_arrays(curves.arrays())
    for name, array in curves.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array)
    assert (again.loss, again.validation, again.seconds) == (curves.loss, curves.validation, curves.seconds)
    assert Curves.from_arrays(Curves().arrays()) == Curves()


def test_steps_that_were_skipped_are_numbered_across_checkpoints():
    def span(*skips):
        return [Seen(2.5, np.int32(count), Watched(np.zeros(3), np.zeros(3))) for count in skips]

    curves = Curves()
    curves.add(span(1, 1, 2), 0.1)
    curves = Curves.from_arrays(curves.arrays())
    # Two optimizers in one may both count a step; it is one.
    curves.add(span(2, 4, 4), 0.1)
    assert curves.skipped == [1, 3, 5] and curves.skips == 4 and curves.loss == [2.5] * 6


def test_a_span_of_steps_keeps_the_last_scale_and_the_worst_saturation():
    step, scale, saturation = make_curves().watched[0]
    assert step == 10
    np.testing.assert_array_equal(scale, np.full(3, 9.5, np.float32))
    np.testing.assert_array_equal(saturation, np.full(3, np.float32(0.1 * 9)))


# --- display and report -----------------------------------------------------------------------


def test_without_a_terminal_progress_is_lines(capsys, monkeypatch):
    curves = {"O2": make_curves(10), "bf16": make_curves(10)}
    with train.Progress(curves, steps=20, amount=100) as progress:
        progress.show()
        progress.show()  # too soon for another line
        for of_one in curves.values():
            of_one.add([Seen(1.5, 0, Watched(np.zeros(3), np.zeros(3)))] * 10, seconds=0.5)
        progress.show()  # the last one always comes
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 10/20") and "O2: loss 3.100 val 1.250, 4,000 tokens/s" in first
    assert last.startswith("step 20/20") and "bf16: loss 1.500" in last and "2,000 tokens/s" in last


TENSORS = [Tensor("h/mlp/c_fc", "0", operand) for operand in observe.OPERANDS]


FOOTPRINT = Footprint([Line("weights <", 1_510_000, None), Line("total", None, 7)])


def make_outcome(loss=1.25, tensors=TENSORS):
    curves = make_curves(tensors=len(tensors))
    curves.validation[-1] = (30, loss)
    layers = "O2: 4 < 7 layers in FP8"
    return report.Outcome(curves, 768, 1000, Bytes(2.0, 1.0, 3.0, 0.5), tensors, layers, FOOTPRINT)


class Page(html.parser.HTMLParser):
    """The text of a page, its images, and its tags that were never closed."""

    def __init__(self, content):
        super().__init__()
        self.text, self.images, self.open = [], [], []
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, content):
        self.text.append(content)


ABOUT = {"data": "some <text>", "device": "cpu", "settings": {"steps": 30, "lr": 0.001}}


def test_report_holds_everything(tmp_path):
    outcomes = {"O2": make_outcome(1.2612), "bf16": make_outcome(1.25, tensors=[])}
    path = report.write(tmp_path, ABOUT, outcomes)
    for name in ("losses.png", "scales.png", "saturation.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = Page(path.read_text())
    text = " ".join(page.text)
    assert len(page.images) == 3 and all(src.startswith("data:image/png;base64,") for src in page.images)
    assert page.open == []
    for expected in (
        "1.2612",
        "+0.0112",
        "0.0112 above its bf16 twin",
        "some <text>",
        "4 < 7 layers",
        "MB on one device",
        "1.51",
        "weights <",
        "Skipped steps: none were.",
        "0.001",
    ):
        assert expected in text, expected
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["gap"] == pytest.approx(0.0112)
    assert result["models"]["O2"]["training_losses"] == outcomes["O2"].curves.loss
    assert result["models"]["bf16"]["validation_losses"] == [[15, 3.5], [30, 1.25]]
    assert result["models"]["O2"]["memory"][1] == {
        "part": "total",
        "arrays": None,
        "compiled": 7,
    }
    assert result["models"]["O2"]["bytes_per_parameter"] == Bytes(2.0, 1.0, 3.0, 0.5)._asdict()
    assert result["models"]["O2"]["tokens_per_second"] == pytest.approx(30 * 768 / 0.75)


def test_report_without_scales_says_so(tmp_path):
    text = report.write(tmp_path, ABOUT, {"te": make_outcome(tensors=[])}).read_text()
    assert "te keeps no delayed scales" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.png", "report.html", "result.json"]


def test_skipped_steps_are_told_and_their_losses_are_no_numbers(tmp_path):
    skipping = make_outcome(tensors=[])
    skipping.curves.skipped += [3, 20]
    skipping.curves.loss[2], skipping.curves.loss[19] = float("nan"), float("inf")
    skipping.curves.validation[-1] = (30, float("nan"))
    path = report.write(tmp_path, ABOUT, {"O2": skipping})
    assert "O2 skipped 2 of 30 steps: 3, 20." in " ".join(Page(path.read_text()).text)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert result["models"]["O2"]["skipped_steps"] == [3, 20]
    losses = result["models"]["O2"]["training_losses"]
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [3, 20]
    assert (
        result["models"]["O2"]["validation_losses"][-1][1]
        is result["models"]["O2"]["validation_loss"]
        is None
    )
    assert report.rows({"O2": skipping})[4] == ["steps skipped", "2"]
    before = (tmp_path / "losses.png").read_bytes()
    skipping.curves.skipped.clear()
    assert figures.losses({"O2": skipping.curves}) != before


def test_without_validation_the_end_of_training_is_told(tmp_path):
    outcome = make_outcome()._replace(unit="rows")
    outcome.curves.validation.clear()
    outcome.curves.loss[-3:] = [1.0, float("nan"), 2.0]
    table = report.rows({"te": outcome})
    assert table[1:3] == [["training loss, last tenth", "1.5000"], ["rows/s", "30,720"]]
    assert report.verdict({"te": outcome}) == "te reached a training loss of 1.5000."


def test_a_footprint_is_of_arrays_and_of_the_program():
    compiled = program.Program((), (), 1, 1, temporaries=50, arguments=36, outputs=20, donated=16)
    variables, opt_state = {"w": jnp.zeros((2, 3))}, (jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.bfloat16))
    found = footprint(variables, opt_state, np.zeros(1, np.int32), compiled)
    rows = {line.part.split(":")[0]: line[1:] for line in found.lines}
    assert rows["weights, with scales and statistics"] == (24, None)
    assert rows["moments"] == (4, None) and rows["batch and counters"] == (8, None)
    assert rows["what a step takes"] == (36, 36)
    assert rows["gradients, activations and temporaries"] == (None, 54)
    assert rows["total at the fullest moment"] == (None, 90)
    assert found.table()[0] == ["bytes on one device", "arrays", "compiled"]
    assert found.table()[-1] == ["total at the fullest moment", "", "90"]


def test_a_file_of_the_report_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report.html cannot be written \(Is a directory\); mend that"):
        report.write(tmp_path, ABOUT, {"te": make_outcome(tensors=[])})
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_state_larger_than_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr("fp8jax.train.footprint._memory_of_device", lambda: 3e9)
    state = {"w": jax.ShapeDtypeStruct((10**9,), jnp.float32)}
    check_fits(state, devices=2)
    with pytest.raises(ValueError, match="need 4 GB of each device, and there are 3 GB"):
        check_fits(state)


def test_table_on_the_terminal(capsys):
    report.show({"O2": make_outcome(1.2612), "bf16": make_outcome(1.25)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["validation", "loss", "1.2612", "1.2500"] in lines
    assert ["gap", "+0.0112"] in lines
    assert ["bytes", "per", "parameter:", "optimizer", "3.00", "3.00"] in lines


def test_smoothing_is_a_running_mean():
    np.testing.assert_allclose(figures._smooth(np.array([1.0, 4.0, 7.0, 4.0])), [2.5, 4.0, 5.0, 5.5])
    infinite = figures._smooth(np.array([1.0, np.inf, 7.0, np.nan, np.nan, np.nan]))
    np.testing.assert_allclose(infinite, [1.0, 4.0, 7.0, 7.0, np.nan, np.nan])
