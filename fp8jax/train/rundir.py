"""The folder of a run: whose it is, and when it may be written to. Process 0 decides and writes for all.

    runs/gpt-1/settings.json    # the settings the run was started with, and its text's fingerprint
              checkpoints/      # see `fp8jax.train.checkpoint`
              report.html ...   # see `fp8jax.train.report`

A folder is never taken over: a new run needs one that is new or empty, a resumed run one whose
settings are the same. A run compiles after it chose a folder, and takes it when it is about to train:
of two that chose the same the second is refused.
"""

import json
import os
import pathlib
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from fp8jax.train import checkpoint, processes

RUNS = pathlib.Path("runs")

# Settings that a resumed run may be given anew: the text itself is compared, not its path; how often a run
# tells and saves, and what its report says, changes no number.
_BOOKKEEPING = ("log_interval", "checkpoint_interval", "logging_steps", "save_steps")
MAY_CHANGE = ("data", "out", "resume", "plan", *_BOOKKEEPING)
_SETTINGS = "settings.json"
_ANOTHER = "start a new run in another folder"


class Words(NamedTuple):
    """What a program's user knows things by."""

    folder: str = "--out"  # the setting
    resume: str = "--resume"  # what goes on with a run
    same: str = "leave {flag} out"  # what goes on with the settings that a run began with
    name: str = "gpt"  # of runs in folders that nobody named


OPTIONS = Words()


def choose(out: str, resume: bool, words: Words = OPTIONS) -> pathlib.Path:
    """The folder that a run shall use; nothing is created.

    Args:
        out: the folder, or "" for runs/gpt-N: the next free N, or with `resume` the newest.
        resume: whether to go on with the run that is there.
        words: for names and errors.

    Raises:
        ValueError: the folder is taken and `resume` is not set, or it is no folder.
    """
    return pathlib.Path(processes.decide(lambda: str(_choose(out, resume, words))))


def _choose(out: str, resume: bool, words: Words) -> pathlib.Path:
    if not out:
        names = (p.name for p in RUNS.glob(f"{words.name}-*"))
        numbers = [int(m[1]) for name in names if (m := re.fullmatch(rf"{words.name}-(\d+)", name))]
        last = max(numbers, default=0)
        return RUNS / f"{words.name}-{max(1, last if resume else last + 1)}"
    folder = pathlib.Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{words.folder} {out} is a file; give a folder for the run")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{words.folder} {out} holds a run already: add {words.resume} to go on with it, or give another "
            f"{words.folder}"
        )
    return folder


class Began(NamedTuple):
    """How a run began."""

    settings: dict[str, Any]  # empty if no run did
    text: str  # fingerprint of the data


def began(folder: pathlib.Path, names: Collection[str]) -> Began:
    """How the run in `folder` began; `Began({}, "")` if there is none.

    Args:
        folder: of the run.
        names: the settings that this program knows.

    Raises:
        ValueError: the file that should say it is damaged, or of another version.
    """
    path = folder / _SETTINGS
    try:
        found = Began(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Began({}, "")
    except (OSError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged, so the run cannot be resumed; {_ANOTHER}") from None
    if not set(found.settings) <= set(names):
        raise ValueError(f"the run in {folder} was made by another version of this program; {_ANOTHER}")
    return found


def check_same(folder: pathlib.Path, found: Began, now: Began, words: Words = OPTIONS) -> None:
    """Raises ValueError if the run that was found is not the one that is asked for."""
    if not found.settings:
        return
    for name, value in found.settings.items():
        if name not in MAY_CHANGE and now.settings[name] != value:
            flag = "--" + name.replace("_", "-")
            difference = f"has {flag} {value}, not {now.settings[name]}"
            same = words.same.format(flag=flag)
            raise ValueError(f"the run in {folder} {difference}; {same} to go on with it, or {_ANOTHER}")
    if found.text != now.text:
        raise ValueError(
            f"the run in {folder} began with other data than there is now; give that, or {_ANOTHER}"
        )


def start(folder: pathlib.Path, found: Began, now: Began, words: Words = OPTIONS) -> None:
    """Makes the folder of a new run, with a note of how it began; from then on it is taken.

    Args:
        folder: as `choose` gave it.
        found: what `began` found there; if that was a run, nothing is written.
        now: how this run begins.
        words: for errors.

    Raises:
        ValueError: the folder cannot be made or written, or another run took it after it was chosen.
    """
    # All ask, whatever they found: a process that comes late finds what process 0 wrote.
    processes.decide(lambda: None if found.settings else _start(folder, now, words))


def _start(folder: pathlib.Path, now: Began, words: Words) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _SETTINGS, "x", encoding="utf-8") as file:
            file.write(json.dumps(now._asdict(), indent=1))
    except FileExistsError:
        raise ValueError(
            f"{folder} was taken by another run meanwhile; start again, or give another {words.folder}"
        ) from None
    except OSError as error:
        raise ValueError(f"{words.folder} {folder} cannot be written: {error.strerror}") from None


def how_to_go_on(folder: pathlib.Path, words: Words = OPTIONS) -> str:
    """What to do with a run that ended too early."""
    step = checkpoint.last_step(folder / "checkpoints")
    return (
        f"start again with {words.folder} {folder} {words.resume}, over any number of processes: it goes on "
        f"from step {step}"
    )


def write(path: pathlib.Path, content: str) -> None:
    """Writes a file that is either the old one or the new one, whenever the process dies."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)
