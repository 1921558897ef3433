"""Checkpoints that are either whole or not there.

    save(folder, step, state, history, data=batches.state())      # folder/step-00000500/
    checkpoint, skipped = newest(folder, like=state)   # None if there is none

A checkpoint is written under another name, with the SHA-256 of each of its files, and
renamed when it is complete. One that a kill cut off, or that was damaged later, is skipped,
which `newest` says, and the one before it is taken: the last three are kept. A checkpoint knows
its step and its run, so one under the name of another is skipped too.

Of many processes each writes its part of the arrays, in a folder that all of them see, and process 0
does the rest. Any number of them can read it.

    step-00000500/state/          # orbax: the arrays as they are, FP8 codes and scales too
                  history.npz     # the curves up to here
                  data.json       # where the batches stopped, if the run said so
                  leaves.json     # the path, dtype and shape of each array
                  identity.json   # its step and its run
                  manifest.json   # the SHA-256 of each of the files above
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fp8jax.train import processes

KEPT = 3
_PARTIAL = "writing-"
CUT_OFF = "it was cut off while it was written"
_REASONS = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)))


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Any  # a pytree of arrays
    history: dict[str, np.ndarray]
    data: Any = None  # as it was saved: where the batches stopped


def save(
    folder: pathlib.Path,
    step: int,
    state: Any,
    history: dict[str, np.ndarray],
    data: Any = None,
    run: str = "",
) -> pathlib.Path:
    """Writes a checkpoint and forgets all but the newest three; all processes have to call it.

    Args:
        folder: of all checkpoints of a run; made if need be.
        step: optimizer steps done.
        state: pytree of arrays, over all processes; dtypes are kept, float8 included.
        history: arrays by name.
        data: where the batches stopped, e.g. `Loader.state()`: what JSON can hold, the same in all processes.
            None keeps nothing, as for batches that are drawn by the number of the step.
        run: what tells this run from others, as `rundir.Began.digest`.

    Returns:
        The checkpoint's folder.

    Raises:
        TypeError: JSON cannot hold `data`.
        OSError: the disk is full, or the folder cannot be written; the checkpoints before are as they were.
    """
    files = {} if data is None else {"data.json": json.dumps(data)}  # fails in all processes, or in none
    folder = folder.resolve()
    partial, final = folder / f"{_PARTIAL}{step:08d}", folder / f"step-{step:08d}"
    try:
        processes.decide(functools.partial(_begin, partial))
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(partial / "state", args=ocp.args.StandardSave(state))
        processes.meet()
        files["leaves.json"] = json.dumps(_leaves(state), indent=1)
        files["identity.json"] = json.dumps({"step": step, "run": run})
        processes.decide(functools.partial(_complete, partial, final, files, history))
    except Exception as error:  # tensorstore's have many types
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk it is in the way
        before = last_step(folder)
        kept = f"step {before} is the last that was saved" if before else "none was saved before"
        reason = _reason(error)
        cause = None if reason in _REASONS else error  # what is known needs no kilobytes of tensorstore's
        raise OSError(f"{final} cannot be written ({reason}); mend that and resume: {kept}") from cause
    return final


def newest(folder: pathlib.Path, like: Any, run: str = "") -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that is whole; all processes read the same one.

    Args:
        folder: of all checkpoints of a run.
        like: a state of the same structure; gives shapes, dtypes and placement, which may be another than
            that of the state when it was saved.
        run: as in `save`; checkpoints that another one left are skipped.

    Returns:
        The checkpoint, None if there is none; and for each newer one why it was skipped.

    Raises:
        ValueError: a whole checkpoint holds a state of another structure, or the folder cannot be read.
    """
    folder = folder.resolve()
    step, skipped = processes.decide(functools.partial(_find, folder, _leaves(like), run))
    if step is None:
        return None, skipped
    path = folder / f"step-{step:08d}"
    with np.load(path / "history.npz") as file:
        history = dict(file)
    said = "data.json" in json.loads((path / "manifest.json").read_text())
    data = json.loads((path / "data.json").read_text()) if said else None
    return Checkpoint(step, _restore(path / "state", like), history, data), skipped


def last_step(folder: pathlib.Path) -> int:
    """The step of the newest checkpoint, whole or not; 0 if there is none."""
    return max(map(_step, _named(folder)), default=0)


def _begin(partial: pathlib.Path) -> None:
    for leftover in partial.parent.glob(f"{_PARTIAL}*"):
        _remove(leftover)
    partial.mkdir(parents=True)


def _complete(
    partial: pathlib.Path, final: pathlib.Path, files: dict[str, str], history: dict[str, np.ndarray]
) -> None:
    """What makes a checkpoint of the arrays that were written."""
    np.savez(partial / "history.npz", allow_pickle=False, **history)
    for name, text in files.items():
        (partial / name).write_text(text)
    (partial / "manifest.json").write_text(json.dumps(_digests(partial), indent=1))
    _flush(partial)
    replaced = partial.with_name(f"{partial.name}-replaced")
    if os.path.lexists(final):  # damaged, or saved twice
        final.rename(replaced)
    partial.rename(final)
    # Only now: deleting takes long, and a kill meanwhile would leave no checkpoint of this step.
    _remove(replaced)
    # Those of later steps are damaged, and no reason to forget a whole one.
    for old in [path for path in _named(final.parent) if _step(path) <= _step(final)][:-KEPT]:
        _remove(old)


def _remove(path: pathlib.Path) -> None:
    """Removes a folder, a link or a file; what cannot be removed is in nobody's way."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what orbax's threads print of an error that is raised too: a traceback of each."""
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    was_off = log.disabled

    def unraisable(args: Any) -> None:
        if "Event loop is closed" not in str(args.exc_value):
            hook(args)

    log.disabled, sys.unraisablehook = True, unraisable
    try:
        yield
        sys.unraisablehook = hook  # after an error threads go on for a while
    finally:
        log.disabled = was_off


def _reason(error: Exception) -> str:
    """What the system said, of an error that has it somewhere in kilobytes of text."""
    text = " ".join(str(error).split())
    return next((words for words in _REASONS if words in text), text[:200])


def _find(folder: pathlib.Path, expected: dict[str, str], run: str) -> tuple[int | None, list[str]]:
    """The step of the newest whole checkpoint, and for each newer one why it was skipped."""
    named = _named(folder)
    skipped = [f"{p}: {CUT_OFF}" for p in sorted(folder.glob(f"{_PARTIAL}*"))]
    for path in reversed(named):
        damage = _damage(path, run)
        if damage:
            skipped.append(f"{path}: {damage}")
            continue
        _check_leaves(path, json.loads((path / "leaves.json").read_text()), expected)
        return _step(path), skipped
    return None, skipped


def _restore(path: pathlib.Path, like: Any) -> Any:
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    try:
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.StandardRestore(target))
    except Exception as error:  # tensorstore's have many types
        raise ValueError(
            f"{path} is whole but cannot be read ({_reason(error)}); try the version of orbax that wrote it"
        ) from error


def _leaves(state: Any) -> dict[str, str]:
    """The path of each array of a state -> its dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_leaves(path: pathlib.Path, found: dict[str, str], expected: dict[str, str]) -> None:
    for name in sorted(found.keys() | expected.keys()):
        there, here = found.get(name, "nothing"), expected.get(name, "nothing")
        if there != here:
            raise ValueError(
                f"{path} is of another model or recipe: its {name} is {there}, this run's is {here}; resume "
                "with the settings that the run began with"
            )


def _named(folder: pathlib.Path) -> list[pathlib.Path]:
    """What has the name of a checkpoint, oldest first; a link or a file may have it, too."""
    try:
        names = [name for name in os.listdir(folder) if re.fullmatch(r"step-\d{8,18}", name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}); expected a folder") from None
    return sorted((folder / name for name in names), key=_step)


def _step(path: pathlib.Path) -> int:
    return int(path.name.removeprefix("step-"))


def _damage(path: pathlib.Path, run: str) -> str | None:
    """What is wrong with a checkpoint, or None."""
    if not path.is_dir():
        return "it is no folder"
    try:
        manifest = dict(json.loads((path / "manifest.json").read_text()))
    except (OSError, RecursionError, TypeError, ValueError):
        return "its manifest is missing or damaged"
    if not manifest.keys() >= {"history.npz", "leaves.json"}:
        return "its manifest is missing or damaged"
    try:
        found = _digests(path)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    wrong = [name for name, digest in manifest.items() if found.get(name) != digest]
    if wrong:
        return f"{wrong[0]} is missing or damaged"
    # Checkpoints of older versions did not say.
    about = json.loads((path / "identity.json").read_text()) if "identity.json" in manifest else {}
    if about.get("step", _step(path)) != _step(path):
        return f"it is the checkpoint of step {about['step']} under another name"
    if run and about.get("run", run) != run:
        return "it is of another run, with other settings or data"
    return None


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of each file below `folder` but the manifest."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def _flush(folder: pathlib.Path) -> None:
    """Puts the files on the disk before their folder gets its name: a rename can overtake them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
