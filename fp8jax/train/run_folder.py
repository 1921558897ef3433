"""The folder of a run. Process 0 reads and writes it for all.

    runs/gpt-1/settings.json    # the settings and the data that the run began with
              checkpoints/      # see `fp8jax.train.checkpoint`
              saved.json        # the step of the newest checkpoint
              metrics.jsonl     # see `fp8jax.train.metrics`
              statistics/       # a file of `fp8jax.statistics` for each time that they were taken
              report.html ...   # see `fp8jax.train.report`

No folder is overwritten: a new run needs a folder that is new or empty, and a resumed run needs the folder of
a run with the same settings. A run takes its folder before it compiles. So of two runs that chose the same
folder the second is refused, and a run that was killed while it compiled can be resumed. A process that
trains has settings.json locked, so a second one that resumes the same run is refused, too.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from jaxtyping import PyTree

from fp8jax.inspect.numerics import OperandRow
from fp8jax.inspect.numerics import rows as measured_rows
from fp8jax.recipe import Recipe
from fp8jax.train import checkpoint, distributed
from fp8jax.train.config import DEFAULT_RECIPE
from fp8jax.train.errors import unwritten

RUNS = pathlib.Path("runs")
DATA = ("data", "`validation` rows", "`final_validation` rows")
# Settings beside the options: rows of a batch, and the twin's options as `checks.options_of_twin` gives them.
ROWS, OF_TWIN = "rows", "of_twin"
_SETTINGS, _SAVED = "settings.json", "saved.json"
# Errors of damaged JSON.
_UNREADABLE = (OSError, RecursionError, LookupError, OverflowError, TypeError, ValueError)


class RunMetadata(NamedTuple):
    """The settings and the data that a run began with."""

    settings: dict[str, Any]  # empty if there is no run
    data: str  # fingerprints of the rows and, separated by "; ", of `DATA[1:]`, see `checks.fingerprint`

    @property
    def digest(self) -> str:
        """Identifies the run: runs with equal metadata are the same."""
        return hashlib.sha256(json.dumps(self, sort_keys=True).encode()).hexdigest()


def choose(folder: str, *, resume: bool = False, or_start: bool = False, name: str = "gpt") -> pathlib.Path:
    """Chooses the folder of a run; creates nothing.

    Args:
        folder: the folder, in which ~ is the user's home, or "" for runs/NAME-N: the next free N, or with
            `resume` the newest.
        resume: whether to go on with the run that is there. Messages name it --resume, as a command line.
        or_start: whether `resume` may find no run.
        name: see `folder`.

    Raises:
        ValueError: the folder holds a run and `resume` is not set, or none and it is, or cannot be used.
    """
    if or_start and not resume:
        raise ValueError("--or-start is an option of --resume; add that, or leave it out")
    return pathlib.Path(
        distributed.decide(lambda: _choose(folder or _numbered(resume, name), resume, or_start))
    )


def _choose(chosen: str, resume: bool, or_start: bool) -> str:
    folder = pathlib.Path(os.path.expanduser(chosen))
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise ValueError(f"{folder} is a file; give a folder for the run")
        is_taken = folder.is_dir() and bool(os.listdir(folder))
        has_run = is_taken and os.path.lexists(folder / _SETTINGS)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}); give another folder") from None
    if is_taken and not has_run:
        raise ValueError(f"{folder} holds files and no run ({_SETTINGS} is missing); give another folder")
    if has_run and not resume:
        raise ValueError(
            f"{folder} holds a run already: add --resume to go on with it, or give another folder"
        )
    if resume and not has_run and not or_start:
        raise ValueError(f"--resume found no run in {folder}; give the folder of one, or add --or-start")
    checkpoints = folder / "checkpoints"
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        raise ValueError(f"{checkpoints} is no folder; move it away, or give another folder")
    for path in (folder, checkpoints):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(f"{path} is read-only; copy the run to a folder that can be written")
    return str(folder)


def _numbered(resume: bool, name: str) -> str:
    names = (path.name for path in RUNS.glob(f"{name}-*"))
    last = max((int(m[1]) for found in names if (m := re.fullmatch(rf"{name}-(\d+)", found))), default=0)
    return str(RUNS / f"{name}-{max(1, last if resume else last + 1)}")


def read(folder: pathlib.Path, names: Collection[str]) -> RunMetadata:
    """The metadata of the run in `folder`; `RunMetadata({}, "")` if there is none.

    `names` are the settings that this program knows.

    Raises:
        ValueError: the file is damaged, or of another version of the program.
    """
    path = folder / _SETTINGS
    if not os.path.lexists(path):
        return RunMetadata({}, "")
    try:
        content = _read_json(path)
        found = RunMetadata(dict(content["settings"]), str(content["data"]))
        if content["digest"] != found.digest:
            raise ValueError("it was changed after the run began")
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} is damaged ({reason}), so the run cannot be resumed; start a new run in another folder"
        ) from None
    if not found.settings.keys() <= {*names, ROWS, OF_TWIN}:
        raise ValueError(f"another version of this program made the run in {folder}; start a new run")
    return found


def check_same(folder: pathlib.Path, found: RunMetadata, now: RunMetadata, fixed: Collection[str]) -> None:
    """Raises ValueError if the run that was found in the folder is not the one that is asked for now.

    `fixed` are the names of the settings that a resumed run cannot change.
    """
    for name, value in found.settings.items():
        if name in fixed and not _is_same(name, value, now.settings[name]):
            flag = "--" + name.replace("_", "-")
            before, given = ('""' if each == "" else each for each in (value, now.settings[name]))
            raise ValueError(
                f"the run in {folder} has {flag} {before}, not {given}; leave {flag} as it was, or start a "
                "new run in another folder"
            )
    before, given = (each.settings.get(OF_TWIN) for each in (found, now))
    if before and before != given:  # older runs have none
        raise ValueError(
            f"the run in {folder} has a twin with {before}; got {given or 'none'}; leave `twin` as it was, "
            "or start a new run in another folder"
        )
    parts = zip(DATA, found.data.split("; "), now.data.split("; "), strict=False)
    if found.settings and (other := [name for name, before, given in parts if before != given]):
        raise ValueError(
            f"the run in {folder} began with other {other[0]}; give that, or start a new run in another "
            "folder"
        )


def _is_same(name: str, before: Any, given: Any) -> bool:
    """Whether two values of a setting mean the same: a recipe has several names, and may be left out."""
    if name == "recipe":
        with contextlib.suppress(ValueError):  # a recipe that this version does not know
            before, given = (Recipe.parse(text or DEFAULT_RECIPE) for text in (before, given))
    return before == given


@contextlib.contextmanager
def taken(folder: pathlib.Path, found: RunMetadata, now: RunMetadata) -> Iterator[Callable[[], Any]]:
    """Takes a folder for the block: writes the metadata of a new run, and locks the run.

    Gives a function, to be called when the run begins. Before that an exception in the block removes what was
    written.

    Raises:
        ValueError: the folder cannot be written, another run took it meanwhile, or another process trains in
            it.
    """
    undo = contextlib.ExitStack()
    with contextlib.ExitStack() as locks:
        # All processes ask: one that comes late finds what process 0 wrote.
        distributed.decide(lambda: None if found.settings else _take(folder, now, undo))
        distributed.decide(lambda: _lock(folder / _SETTINGS, locks))
        try:
            yield undo.pop_all  # nothing is undone from then on
        except Exception:
            with contextlib.suppress(OSError):
                undo.close()
            raise


def _lock(path: pathlib.Path, locks: contextlib.ExitStack) -> None:
    """Locks a file until `locks` is closed or the process dies, where there are locks."""
    if fcntl is None:
        return
    try:
        # NFS locks only files that are open for writing.
        file = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    locks.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another process trains in {path.parent}; wait for its end, or stop it, or give another folder"
        ) from None
    except OSError as error:
        distributed.warn(
            f"{path.parent} cannot be locked ({error.strerror}); start no second process that resumes it"
        )


def _take(folder: pathlib.Path, now: RunMetadata, undo: contextlib.ExitStack) -> None:
    """Writes the metadata of a new run; `undo` removes what was written."""
    path, content = folder / _SETTINGS, json.dumps({**now._asdict(), "digest": now.digest}, indent=1)
    try:
        for new in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            new.mkdir(exist_ok=True)
            undo.callback(new.rmdir)
        with open(path, "x", encoding="utf-8") as file:  # no link to a whole file: some mounts have no links
            undo.callback(path.unlink)
            file.write(content)
    except FileExistsError:
        raise ValueError(
            f"another run took {folder} meanwhile; start again, or give another folder"
        ) from None
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            undo.close()
        reason = getattr(error, "strerror", error)
        raise ValueError(f"{folder} cannot be written: {reason}; mend that, or give another folder") from None


def save(folder: pathlib.Path, step: int, state: PyTree, metadata: dict[str, Any], run: str) -> None:
    """Writes a checkpoint, see `checkpoint.save`, and notes its step."""
    checkpoint.save(folder / "checkpoints", step, state, metadata, run)
    distributed.decide(lambda: write(folder / _SAVED, json.dumps({"step": step})))


def restore(folder: pathlib.Path, like: PyTree, run: str, or_start: bool) -> checkpoint.Checkpoint | None:
    """The newest undamaged checkpoint, see `checkpoint.restore`; each one that is skipped gets a warning.

    Returns:
        The checkpoint; None if the run was killed before its first one, or begins again.

    Raises:
        ValueError: checkpoints were saved, all are damaged or lost, and `or_start` is not set.
    """
    found, skipped = checkpoint.restore(folder / "checkpoints", like, run)
    last = distributed.decide(lambda: _last_saved(folder))
    if not skipped and last > (found.step if found else 0):
        skipped = [f"the checkpoint of step {last}: it was saved in {folder}, and is gone"]
    if found is None and skipped and not or_start:
        raise ValueError(
            f"all checkpoints in {folder} are damaged or lost: {skipped[0]}; put one back, or begin at step "
            "0 with --or-start"
        )
    for reason in skipped:
        distributed.warn(f"skipping {reason}")
    if found is None:
        distributed.warn(f"no checkpoint in {folder}, so the run starts at step 0")
    return found


def _last_saved(folder: pathlib.Path) -> int:
    """The step that the run saved last; 0 if it saved none."""
    path = folder / _SAVED
    try:
        return int(_read_json(path)["step"]) if os.path.lexists(path) else 0
    except _UNREADABLE:
        distributed.warn(f"{path} is damaged; it says which checkpoint is the last")
        return 0


def _read_json(path: pathlib.Path) -> Any:
    if path.exists() and not path.is_file():
        raise OSError(None, "it is no file")  # a pipe may have no writer
    return json.loads(path.read_text(encoding="utf-8"))


def write_statistics(folder: pathlib.Path, step: int, rows: Iterable[OperandRow]) -> None:
    """Writes the rows of `fp8jax.statistics` after `step` steps, for `inspect.numerics.load_run`.

    Raises:
        OSError: they cannot be written.
    """
    (folder / measured_rows.FOLDER).mkdir(exist_ok=True)
    write(folder / measured_rows.FOLDER / f"{step:08}.json", measured_rows.as_json(rows))


def remove_statistics(folder: pathlib.Path, step: int) -> None:
    """Removes those of later steps, which a resumed run does again."""
    for path in measured_rows.files_of_run(folder):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink()


def write(path: pathlib.Path, content: str | bytes) -> None:
    r"""Replaces a file at once: whenever the process dies, the file is the old one or the new one.

    Bytes of a command line that are not UTF-8, surrogates in Python, are written as \udcff.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise unwritten(path, error) from None
