"""The folder of a run."""

import errno
import functools
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from fp8jax.train import run_folder
from fp8jax.train.run_folder import RunMetadata


def test_folders_are_numbered_and_never_taken_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder.choose("", resume=False) == pathlib.Path("runs/gpt-1")
    for name in ("gpt-2", "gpt-10", "gpt-x", "other-50"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert run_folder.choose("", resume=False) == pathlib.Path("runs/gpt-11")
    (tmp_path / "runs/gpt-10/settings.json").touch()
    assert run_folder.choose("", resume=True) == pathlib.Path("runs/gpt-10")
    (tmp_path / "taken").mkdir()
    assert run_folder.choose("taken", resume=False) == pathlib.Path("taken")
    (tmp_path / "taken" / "settings.json").touch()
    assert run_folder.choose("taken", resume=True) == pathlib.Path("taken")
    with pytest.raises(ValueError, match="holds a run already: add --resume to go on with it"):
        run_folder.choose("taken", resume=False)


def test_a_folder_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for out in ("~/run", pathlib.Path("~/run")):
        assert run_folder.choose(out, resume=False) == tmp_path / "run"


@pytest.mark.parametrize(
    "out, resume, or_start, says",
    [
        ("", True, False, "--resume found no run in runs/gpt-1; give the folder of one, or add --or-start"),
        ("nothing", True, False, "--resume found no run in nothing"),
        ("empty", True, False, "--resume found no run in empty"),
        ("others", True, True, "others holds files and no run (settings.json is missing)"),
        ("others", False, False, "others holds files and no run (settings.json is missing)"),
        ("others/file", True, True, "others/file is a file"),
        ("dangling", False, False, "dangling is a file"),
        ("a" * 300, False, False, "cannot be read (File name too long)"),
        ("empty", False, True, "--or-start is an option of --resume"),
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
        assert run_folder.choose(out, resume=resume, or_start=or_start) == pathlib.Path(out or "runs/gpt-1")
        return
    with pytest.raises(ValueError) as caught:
        run_folder.choose(out, resume=resume, or_start=or_start)
    assert says in str(caught.value)


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """It is refused before the work."""
    (tmp_path / "settings.json").touch()
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "checkpoints")  # root may write anywhere
    with pytest.raises(ValueError, match="checkpoints is read-only; copy the run to a folder that can be"):
        run_folder.choose(str(tmp_path), resume=True)


NONE = RunMetadata({}, "")
NAMES = ["lr", "data", "save_steps"]


@pytest.mark.parametrize("make", [pathlib.Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_checkpoints_that_are_no_folder_are_named(tmp_path, make):
    (tmp_path / "settings.json").touch()
    make(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="checkpoints is no folder; move it away, or give another folder"):
        run_folder.choose(str(tmp_path), resume=True)


@pytest.mark.parametrize("content", [b"\xff", b'{"step": 1e999}', b'{"step": "x"}', b"[]", None])
def test_a_note_of_the_last_checkpoint_that_is_damaged(tmp_path, content, capsys):
    if content is None:
        os.mkfifo(tmp_path / "saved.json")
    else:
        (tmp_path / "saved.json").write_bytes(content)
    assert run_folder.restore(tmp_path, {}, "run", or_start=False) is None
    assert "saved.json is damaged; it says which checkpoint is the last" in capsys.readouterr().err


HOLD = """
import pathlib, sys
from fp8jax.train import run_folder
folder = pathlib.Path(sys.argv[1])
found = run_folder.read(folder, ["lr"])
with run_folder.taken(folder, found, found):
    print("taken", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_of_one_process_at_a_time(tmp_path):
    """A lock that its holder's death opens, whatever it died of."""
    with run_folder.taken(tmp_path, NONE, RunMetadata({"lr": 1}, "text")):
        pass
    found = run_folder.read(tmp_path, ["lr"])
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(ValueError, match="another process trains in .*; wait for its end, or stop it"):
            with run_folder.taken(tmp_path, found, found):
                pass
        other.kill()
    with run_folder.taken(tmp_path, found, found), pytest.raises(ValueError, match="another process trains"):
        with run_folder.taken(tmp_path, found, found):
            pass
    with run_folder.taken(tmp_path, found, found):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with run_folder.taken(tmp_path, NONE, RunMetadata({"lr": 1}, "text")):
        assert "cannot be locked (No locks available); start no second process" in capsys.readouterr().err


def test_settings_of_a_resumed_run(tmp_path):
    """It keeps its settings and its data; only options that change no number may differ."""
    assert run_folder.read(tmp_path, NAMES) == NONE
    settings = {"lr": 0.1, "data": "x", "save_steps": 5}
    with run_folder.taken(tmp_path, NONE, RunMetadata(settings, "text")):
        found = run_folder.read(tmp_path, NAMES)
    assert found == RunMetadata(settings, "text")
    with run_folder.taken(tmp_path, found, RunMetadata({**settings, "lr": 0.2}, "text")):
        assert run_folder.read(tmp_path, NAMES) == found
    moved = {**settings, "data": "y", "save_steps": 50}
    run_folder.check_same(tmp_path, found, RunMetadata(moved, "text"), {"lr"})
    with pytest.raises(ValueError, match="has --lr 0.1, not 0.2; leave --lr as it was, or start a new run"):
        run_folder.check_same(tmp_path, found, RunMetadata({**moved, "lr": 0.2}, "text"), {"lr"})
    with pytest.raises(ValueError, match="began with other data"):
        run_folder.check_same(tmp_path, found, RunMetadata(moved, "other"), {"lr"})
    with pytest.raises(ValueError, match="another version"):
        run_folder.read(tmp_path, NAMES[1:])
    whole = (tmp_path / "settings.json").read_text()
    (tmp_path / "settings.json").unlink()
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(ValueError, match=r"settings.json is damaged \(it is no file\)"):
        run_folder.read(tmp_path, NAMES)
    (tmp_path / "settings.json").unlink()
    for damaged in (whole[:-5], "", "[]", "3", "{}", "[" * 10**5, whole.replace("0.1", "0.3")):
        (tmp_path / "settings.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"settings.json is damaged \("):
            run_folder.read(tmp_path, NAMES)


@pytest.mark.parametrize(
    "began, now, says",
    [
        ({"recipe": ""}, {"recipe": "fp8"}, None),  # the default
        ({"recipe": "te,scaling=current"}, {"recipe": "current"}, None),
        ({"recipe": "older"}, {"recipe": "older"}, None),
        ({"recipe": "older"}, {"recipe": "te"}, "has --recipe older, not te; leave --recipe as it was"),
        ({"recipe": ""}, {"recipe": "te"}, 'has --recipe "", not te; leave --recipe as it was'),
        ({"rules": "a:O2"}, {"rules": ""}, 'has --rules a:O2, not ""; leave --rules as it was'),
        ({"recipe": "", "bf16": True}, {"recipe": "fp8", "bf16": False}, "has --bf16 True, not False; leave"),
    ],
)
def test_settings_are_compared_by_their_meaning(tmp_path, began, now, says):
    check = functools.partial(
        run_folder.check_same, tmp_path, RunMetadata(began, "text"), RunMetadata(now, "text"), set(began)
    )
    if says is None:
        return check()
    with pytest.raises(ValueError) as caught:
        check()
    assert says in str(caught.value)


def test_a_run_that_does_not_compile_gives_its_folder_back(tmp_path):
    folder, now = tmp_path / "run", RunMetadata({"lr": 1}, "text")
    for error, remains in ((RuntimeError, False), (KeyboardInterrupt, True)):
        with pytest.raises(error), run_folder.taken(folder, NONE, now):
            raise error
        assert folder.exists() == remains
    assert run_folder.read(folder, ["lr"]) == now


@pytest.mark.parametrize("name", ["new/run", "empty"])
def test_a_run_that_does_not_compile_leaves_folders_as_they_were(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError), run_folder.taken(tmp_path / name, NONE, RunMetadata({"lr": 1}, "text")):
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("name", ["new/run", "empty"])
def test_a_disk_that_is_full_at_the_start(tmp_path, name):
    """Nothing new is left, so a new run can begin there."""
    (tmp_path / "empty").mkdir()
    folder, limit = tmp_path / name, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot be written: File too large; mend that, or give anoth"):
            with run_folder.taken(folder, NONE, RunMetadata({"lr": 1}, "text")):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty"]
    assert run_folder.choose(str(folder), resume=False) == folder


def test_two_runs_that_chose_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (RunMetadata({"lr": lr}, "text") for lr in (1, 2))
    folder, same = (run_folder.choose("", resume=False) for _ in range(2))
    assert folder == same
    with run_folder.taken(folder, NONE, first):
        with pytest.raises(ValueError, match="another run took runs/gpt-1 meanwhile; start again, or give"):
            with run_folder.taken(same, NONE, second):
                pass
    assert run_folder.read(folder, ["lr"]) == first
