"""Checkpoints that are either whole or not there.

    save(folder, step, state, history)            # folder/step-00000500/
    checkpoint, skipped = newest(folder, like=state)   # None if there is none

A checkpoint is written under another name, with the SHA-256 of each of its files, and
renamed when it is complete. One that a kill cut off, or that was damaged later, is skipped,
which `newest` says, and the one before it is taken: the last three are kept.

    step-00000500/state/          # orbax: the arrays as they are, FP8 codes and scales too
                  history.npz     # the curves up to here
                  leaves.json     # the path, dtype and shape of each array
                  manifest.json   # the SHA-256 of each of the files above
"""

import hashlib
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

KEPT = 3
_PARTIAL = "writing-"


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Any  # a pytree of arrays
    history: dict[str, np.ndarray]


def save(folder: pathlib.Path, step: int, state: Any, history: dict[str, np.ndarray]) -> pathlib.Path:
    """Writes a checkpoint and forgets all but the newest three.

    Args:
        folder: of all checkpoints of a run; made if need be.
        step: optimizer steps done.
        state: pytree of arrays; dtypes are kept, float8 included.
        history: arrays by name.

    Returns:
        The checkpoint's folder.
    """
    folder = folder.resolve()
    partial, final = folder / f"{_PARTIAL}{step:08d}", folder / f"step-{step:08d}"
    _remove_leftovers(folder)
    partial.mkdir(parents=True)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(partial / "state", args=ocp.args.StandardSave(state))
    np.savez(partial / "history.npz", allow_pickle=False, **history)
    (partial / "leaves.json").write_text(json.dumps(_leaves(state), indent=1))
    (partial / "manifest.json").write_text(json.dumps(_digests(partial), indent=1))
    _flush(partial)
    shutil.rmtree(final, ignore_errors=True)  # there only if it was damaged, and so made again
    partial.rename(final)
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def newest(folder: pathlib.Path, like: Any) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that is whole.

    Args:
        folder: of all checkpoints of a run.
        like: a state of the same structure; gives shapes, dtypes and placement.

    Returns:
        The checkpoint, None if there is none; and for each newer one why it was skipped.

    Raises:
        ValueError: a whole checkpoint holds a state of another structure.
    """
    folder = folder.resolve()
    skipped = [f"{p}: it was cut off while it was written" for p in sorted(folder.glob(f"{_PARTIAL}*"))]
    for path in reversed(_complete(folder)):
        damage = _damage(path)
        if damage:
            skipped.append(f"{path}: {damage}")
            continue
        _check_leaves(path, json.loads((path / "leaves.json").read_text()), _leaves(like))
        with np.load(path / "history.npz") as file:
            history = dict(file)
        return Checkpoint(
            int(path.name.removeprefix("step-")), _restore(path / "state", like), history
        ), skipped
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


def _complete(folder: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints that were renamed, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


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


def _remove_leftovers(folder: pathlib.Path) -> None:
    for partial in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial)
