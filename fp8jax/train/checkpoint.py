"""Checkpoints that are either whole or not there.

    save(folder, step, state, history, data=batches.state())      # folder/step-00000500/
    checkpoint, skipped = newest(folder, like=state)   # None if there is none

A checkpoint is written under another name, with the SHA-256 of each of its files, and
renamed when it is complete. One that a kill cut off, or that was damaged later, is skipped,
which `newest` says, and the one before it is taken: the last three are kept.

Of many processes each writes its part of the arrays, in a folder that all of them see, and process 0
does the rest. Any number of them can read it.

    step-00000500/state/          # orbax: the arrays as they are, FP8 codes and scales too
                  history.npz     # the curves up to here
                  data.json       # where the batches stopped, if the run said so
                  leaves.json     # the path, dtype and shape of each array
                  manifest.json   # the SHA-256 of each of the files above
"""

import functools
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fp8jax.train import processes

KEPT = 3
_PARTIAL = "writing-"


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Any  # a pytree of arrays
    history: dict[str, np.ndarray]
    data: Any = None  # as it was saved: where the batches stopped


def save(
    folder: pathlib.Path, step: int, state: Any, history: dict[str, np.ndarray], data: Any = None
) -> pathlib.Path:
    """Writes a checkpoint and forgets all but the newest three; all processes have to call it.

    Args:
        folder: of all checkpoints of a run; made if need be.
        step: optimizer steps done.
        state: pytree of arrays, over all processes; dtypes are kept, float8 included.
        history: arrays by name.
        data: where the batches stopped, e.g. `Loader.state()`: what JSON can hold, the same in all processes.
            None keeps nothing, as for batches that are drawn by the number of the step.

    Returns:
        The checkpoint's folder.

    Raises:
        TypeError: JSON cannot hold `data`.
    """
    files = {} if data is None else {"data.json": json.dumps(data)}  # fails in all processes, or in none
    folder = folder.resolve()
    partial, final = folder / f"{_PARTIAL}{step:08d}", folder / f"step-{step:08d}"
    processes.decide(functools.partial(_begin, partial))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(partial / "state", args=ocp.args.StandardSave(state))
    processes.meet()
    files["leaves.json"] = json.dumps(_leaves(state), indent=1)
    processes.decide(functools.partial(_complete, partial, final, files, history))
    return final


def newest(folder: pathlib.Path, like: Any) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that is whole; all processes read the same one.

    Args:
        folder: of all checkpoints of a run.
        like: a state of the same structure; gives shapes, dtypes and placement, which may be another than
            that of the state when it was saved.

    Returns:
        The checkpoint, None if there is none; and for each newer one why it was skipped.

    Raises:
        ValueError: a whole checkpoint holds a state of another structure.
    """
    folder = folder.resolve()
    step, skipped = processes.decide(functools.partial(_find, folder, _leaves(like)))
    if step is None:
        return None, skipped
    path = folder / f"step-{step:08d}"
    with np.load(path / "history.npz") as file:
        history = dict(file)
    said = path / "data.json"
    data = json.loads(said.read_text()) if said.exists() else None
    return Checkpoint(step, _restore(path / "state", like), history, data), skipped


def resume(run: pathlib.Path, like: Any) -> Checkpoint | None:
    """The newest checkpoint in a run's folder, as `newest` reads it, with a warning for what is not there."""
    found, skipped = newest(run / "checkpoints", like)
    for reason in skipped:
        processes.warn(f"skipping {reason}")
    if found is None:
        processes.warn(f"no checkpoint in {run}, so the run starts at step 0")
    return found


def last_step(folder: pathlib.Path) -> int:
    """The step of the newest checkpoint, whole or not; 0 if there is none."""
    return max((_step(path) for path in _named(folder)), default=0)


def _begin(partial: pathlib.Path) -> None:
    for leftover in partial.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)
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
    if final.exists():  # damaged, or saved twice
        final.rename(replaced)
    partial.rename(final)
    # Only now: deleting takes long, and a kill meanwhile would leave no checkpoint of this step.
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _named(final.parent)[:-KEPT]:
        shutil.rmtree(old)


def _find(folder: pathlib.Path, expected: dict[str, str]) -> tuple[int | None, list[str]]:
    """The step of the newest whole checkpoint, and for each newer one why it was skipped."""
    skipped = [f"{p}: it was cut off while it was written" for p in sorted(folder.glob(f"{_PARTIAL}*"))]
    for path in reversed(_named(folder)):
        damage = _damage(path)
        if damage:
            skipped.append(f"{path}: {damage}")
            continue
        _check_leaves(path, json.loads((path / "leaves.json").read_text()), expected)
        return _step(path), skipped
    return None, skipped


def _restore(path: pathlib.Path, like: Any) -> Any:
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.StandardRestore(target))


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
    """Checkpoints that were renamed, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _step(path: pathlib.Path) -> int:
    return int(path.name.removeprefix("step-"))


def _damage(path: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = dict(json.loads((path / "manifest.json").read_text()))
    except (OSError, TypeError, ValueError):
        return "its manifest is missing or damaged"
    found = _digests(path)
    wrong = [name for name, digest in manifest.items() if found.get(name) != digest]
    return f"{wrong[0]} is missing or damaged" if wrong else None


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
