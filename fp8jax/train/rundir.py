"""The folder of a run: whose it is, and when it may be written to. Process 0 decides and writes for all.

    runs/gpt-1/settings.json    # the settings the run was started with, and its text's fingerprint
              checkpoints/      # see `fp8jax.train.checkpoint`
              saved.json        # the step of the last of them
              report.html ...   # see `fp8jax.train.report`

A folder is never taken over: a new run needs one that is new or empty, a resumed run one with a run whose
settings are the same. A run takes its folder before it compiles: of two that chose the same the second is
refused, and a run that was killed while it compiled can be resumed.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fp8jax.train import checkpoint, processes

RUNS = pathlib.Path("runs")

# Settings that a resumed run may be given anew: the text itself is compared, not its path; how often a run
# tells and saves, and what its report says, changes no number.
_BOOKKEEPING = ("log_interval", "checkpoint_interval", "logging_steps", "save_steps")
MAY_CHANGE = ("data", "out", "resume", *_BOOKKEEPING)
_SETTINGS = "settings.json"
_SAVED = "saved.json"
_ANOTHER = "start a new run in another folder"


class Words(NamedTuple):
    """What a program's user knows things by."""

    folder: str = "--out"  # the setting
    resume: str = "--resume"  # what goes on with a run
    or_start: str = "--or-start"  # what makes `resume` begin where there is nothing to go on with
    same: str = "leave {flag} out"  # what goes on with the settings that a run began with
    name: str = "gpt"  # of runs in folders that nobody named


OPTIONS = Words()


def choose(out: str, resume: bool, or_start: bool = False, words: Words = OPTIONS) -> pathlib.Path:
    """The folder that a run shall use; nothing is created.

    Args:
        out: the folder, or "" for runs/gpt-N: the next free N, or with `resume` the newest.
        resume: whether to go on with the run that is there.
        or_start: whether `resume` may find no run.
        words: for names and errors.

    Raises:
        ValueError: the folder is taken and `resume` is not set, or there is no run to resume, or it is no
            folder, or cannot be written.
    """
    if or_start and not resume:
        raise ValueError(f"{words.or_start} is for {words.resume}; add that, or leave it out")
    return pathlib.Path(processes.decide(lambda: str(_choose(out, resume, or_start, words))))


def _choose(out: str, resume: bool, or_start: bool, words: Words) -> pathlib.Path:
    flag = words.folder
    folder = pathlib.Path(out) if out else _numbered(resume, words)
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise ValueError(f"{flag} {folder} is a file; give a folder for the run")
        taken = folder.is_dir() and bool(os.listdir(folder))
        has_run = taken and os.path.lexists(folder / _SETTINGS)
    except OSError as error:
        raise ValueError(f"{flag} {folder} cannot be read ({error.strerror}); give another") from None
    if taken and not has_run:
        raise ValueError(
            f"{flag} {folder} holds files and no run ({_SETTINGS} is missing); give another {flag}"
        )
    if has_run and not resume:
        raise ValueError(
            f"{flag} {folder} holds a run already: add {words.resume} to go on with it, or give another "
            f"{flag}"
        )
    if resume and not has_run and not or_start:
        raise ValueError(
            f"{words.resume} found no run in {folder}; give the {flag} of one, or add {words.or_start} "
            "to start one"
        )
    for path in (folder, folder / "checkpoints"):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(
                f"{flag} {folder} cannot be written: {path} is read-only; copy it to where it can be"
            )
    return folder


def _numbered(resume: bool, words: Words) -> pathlib.Path:
    names = (p.name for p in RUNS.glob(f"{words.name}-*"))
    numbers = [int(m[1]) for name in names if (m := re.fullmatch(rf"{words.name}-(\d+)", name))]
    last = max(numbers, default=0)
    return RUNS / f"{words.name}-{max(1, last if resume else last + 1)}"


class Began(NamedTuple):
    """How a run began."""

    settings: dict[str, Any]  # empty if no run did
    text: str  # fingerprint of the data

    @property
    def digest(self) -> str:
        """What tells the run from others: runs that begin alike are the same."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()


def began(folder: pathlib.Path, names: Collection[str]) -> Began:
    """How the run in `folder` began; `Began({}, "")` if there is none.

    Args:
        folder: of the run.
        names: the settings that this program knows.

    Raises:
        ValueError: the file that should say it is damaged, or of another version.
    """
    path = folder / _SETTINGS
    if not os.path.lexists(path):
        return Began({}, "")
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        content = json.loads(path.read_text(encoding="utf-8"))
        found = Began(dict(content["settings"]), str(content["text"]))
        if content.get("digest", found.digest) != found.digest:  # older versions wrote none
            raise ValueError("it was changed after the run began")
    except (OSError, RecursionError, LookupError, TypeError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(f"{path} is damaged ({reason}), so the run cannot be resumed; {_ANOTHER}") from None
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


@contextlib.contextmanager
def given_back(folder: pathlib.Path, found: Began) -> Iterator[None]:
    """An exception from the block, as from compiling, undoes `start`; a kill leaves a run to be resumed."""
    try:
        yield
    except Exception:
        if not found.settings and processes.is_first():
            with contextlib.suppress(OSError):
                (folder / _SETTINGS).unlink()
                folder.rmdir()
                if folder.parent == RUNS:
                    RUNS.rmdir()  # unless it holds other runs
        raise


def _start(folder: pathlib.Path, now: Began, words: Words) -> None:
    path = folder / _SETTINGS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "x", encoding="utf-8")
    except FileExistsError:
        raise ValueError(
            f"{folder} was taken by another run meanwhile; start again, or give another {words.folder}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{words.folder} {folder} cannot be written: {reason}") from None
    try:
        with file:
            file.write(json.dumps({**now._asdict(), "digest": now.digest}, indent=1))
    except OSError as error:
        path.unlink()
        raise ValueError(f"{words.folder} {folder} cannot be written: {error.strerror}") from None


def keep(folder: pathlib.Path, step: int, *args: Any, **more: Any) -> None:
    """Saves a checkpoint as `checkpoint.save` does, and notes that the run in `folder` has one."""
    checkpoint.save(folder / "checkpoints", step, *args, **more)
    processes.decide(lambda: write(folder / _SAVED, json.dumps({"step": step})))


def resume(
    folder: pathlib.Path, like: Any, run: str, or_start: bool, words: Words = OPTIONS
) -> checkpoint.Checkpoint | None:
    """The newest checkpoint in a run's folder, with a warning for each that is not whole.

    Args:
        folder: of the run.
        like: as `checkpoint.newest` takes it.
        run: the digest of how the run began.
        or_start: whether to begin again if all checkpoints are lost.
        words: for errors.

    Returns:
        The checkpoint; None if the run has to begin: it was killed before its first, or `or_start`.

    Raises:
        ValueError: checkpoints were saved, and none of them is whole.
    """
    found, skipped = checkpoint.newest(folder / "checkpoints", like, run)
    last = processes.decide(functools.partial(_last_saved, folder))
    lost = [reason for reason in skipped if not reason.endswith(checkpoint.CUT_OFF)]
    if not lost and last > (found.step if found else 0):
        lost = [f"the checkpoint of step {last}: it was saved in {folder}, and is gone"]
    if found is None and lost and not or_start:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise ValueError(
            f"no checkpoint in {folder} is whole: {lost[0]}{more}; put one back, or begin at step 0 with "
            f"{words.or_start}"
        )
    for reason in dict.fromkeys([*skipped, *lost]):
        processes.warn(f"skipping {reason}")
    if found is None:
        processes.warn(f"no checkpoint in {folder}, so the run starts at step 0")
    return found


def _last_saved(folder: pathlib.Path) -> int:
    """The step that the run saved last; 0 if it saved none, or does not say."""
    try:
        return int(json.loads((folder / _SAVED).read_text(encoding="utf-8"))["step"])
    except (OSError, RecursionError, LookupError, TypeError, ValueError):
        return 0


def how_to_go_on(folder: pathlib.Path, words: Words = OPTIONS) -> str:
    """What to do with a run that ended too early."""
    step = checkpoint.last_step(folder / "checkpoints")
    return (
        f"start again with {words.folder} {folder} {words.resume}, over any number of processes: it goes on "
        f"from step {step}"
    )


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file that is either the old one or the new one, whenever the process dies.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error.strerror}); mend that and resume the run") from None
