"""Checkpoints: orbax's `CheckpointManager`, and a SHA-256 of each file.

    save(folder, step, state, {"data": batches.state()})      # folder/step_00000500/
    checkpoint, skipped = restore(folder, like=state)         # None if there is none

Orbax writes each checkpoint under another name and renames it when it is complete, and keeps the newest
three. Each process then adds the SHA-256 of the files that it wrote. `restore` skips a damaged checkpoint and
takes the one before; the processes share the work of checking files. Any number of processes and devices can
restore.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fp8jax.extras import need
from fp8jax.optim.wrappers import without_variables
from fp8jax.quantization import ScaledArray
from fp8jax.scaling.old_states import are_old, with_one, without_one, without_unread
from fp8jax.train import distributed
from fp8jax.variables import PARAMS

ocp = need("orbax.checkpoint")

MAX_TO_KEEP = 3
# Of orbax's manager, for saving: it deletes partial checkpoints and all but the newest three.
_OPTIONS = ocp.CheckpointManagerOptions(
    max_to_keep=MAX_TO_KEEP,
    step_prefix="step",
    step_format_fixed_length=8,
    cleanup_tmp_directories=True,
    enable_async_checkpointing=False,
)
_REASONS = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)))


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    step: int  # optimizer steps done
    state: PyTree  # a pytree of arrays
    metadata: dict[str, Any]


def save(
    folder: str | os.PathLike[str],
    step: int,
    state: PyTree,
    metadata: dict[str, Any] | None = None,
    run: str = "",
) -> pathlib.Path:
    """Writes a checkpoint and deletes all but the newest three; all processes have to call it.

    Args:
        folder: of all checkpoints of a run; made if need be.
        step: optimizer steps done. A checkpoint of this step or a later one is set aside as damaged.
        state: a pytree of arrays, over all processes; dtypes are preserved, float8 included.
        metadata: JSON values, the same in all processes, e.g. where the batches stopped.
        run: identifies the run, see `run_folder.RunMetadata.digest`.

    Returns:
        The folder of the checkpoint.

    Raises:
        TypeError: JSON cannot hold `metadata`.
        OSError: the folder cannot be written; older checkpoints stay as they were.
    """
    content = json.loads(json.dumps({"step": step, "run": run, "arrays": _arrays(state), **(metadata or {})}))
    folder = pathlib.Path(folder).resolve()
    path = _path(folder, step)
    try:
        distributed.decide(lambda: _make_room(folder, step))
        with _quiet(), ocp.CheckpointManager(folder, options=_OPTIONS) as manager:
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(content))
            manager.save(step, args=items, force=True)
        _write_checksums(path)
        distributed.wait_for_all()
    except Exception as error:  # tensorstore raises many types
        if distributed.is_loss(error):
            raise
        for partial in folder.glob(f"{path.name}*"):
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk it takes the room that the next needs
        last, reason = last_step(folder), _reason(error)
        before = f"step {last} is the last that was saved" if last else "none was saved before"
        cause = None if reason in _REASONS else error  # a known reason needs no kilobytes of tensorstore's
        raise OSError(f"{path} cannot be written ({reason}); mend that and resume: {before}") from cause
    return path


def restore(
    folder: str | os.PathLike[str], like: PyTree, run: str = ""
) -> tuple[Checkpoint | None, list[str]]:
    """Reads the newest checkpoint that is not damaged; all processes read the same one.

    Args:
        folder: of all checkpoints of a run.
        like: arrays or shapes with the structure, dtypes and shardings that the state shall have; other
            shardings than when it was saved will do. For a run of `fit`: `[trainer.like]`, and with a twin
            `[trainer.like, twin.like]`.
        run: as in `save`.

    Returns:
        The checkpoint, None if there is none; and for each damaged newer one the reason.

    Raises:
        ValueError: the newest undamaged checkpoint is of another run or another model.
    """
    folder, skipped = pathlib.Path(folder).resolve(), list[str]()
    for step, path, content in _whole(folder, skipped):
        is_old = are_old(content["arrays"])
        given = without_one(like) if is_old else like
        saved = _as_saved(given, content)
        _check(path, content, saved, run)
        state, damage = _restored(path, saved)
        if distributed.any_of(bool(damage)):
            skipped.append(f"{path}: {damage or 'another process cannot read its arrays'}")
            continue
        state = jax.tree.unflatten(jax.tree.structure(given), jax.tree.leaves(state))
        return Checkpoint(step, with_one(state) if is_old else state, content), skipped
    return None, skipped


def read_variables(folder: str | os.PathLike[str]) -> Checkpoint:
    """Reads the variables of a run's first model from its newest checkpoint that is not damaged.

    Each damaged newer one gets a warning.

    Returns:
        The checkpoint; its state is nested dicts of arrays and `ScaledArray`s, on one device, as Linen's
        variables are.

    Raises:
        ValueError: there is no such checkpoint, or it has another state than a run's.
    """
    folder, skipped = pathlib.Path(folder).resolve(), list[str]()
    for step, path, content in _whole(folder, skipped):
        variables = _variables_in(path)
        boxed = _boxed(content) if PARAMS in variables else ()  # in NNX each array is in a variable
        for reason in skipped:
            distributed.warn(f"skipping {reason}")
        return Checkpoint(step, _with_scaled(variables, boxed), content)
    why = f"the checkpoints are damaged: {skipped[0]}" if skipped else "no checkpoint is there"
    raise ValueError(f"{folder} cannot be read: {why}")


def _variables_in(path: pathlib.Path) -> PyTree:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            found = reader.metadata(path / "state").item_metadata.tree[0]["variables"]
        except (LookupError, TypeError):
            raise ValueError(f"{path} is no checkpoint of `fp8jax.train.fit`") from None
    like = [{"variables": found}]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like)
    return _read(path, shapes)[0]["variables"]


def _boxed(content: dict[str, Any]) -> set[str]:
    """The paths of the first model's parameters in boxes with names of axes, as `keystr` gives them."""
    names = (name.removeprefix("[0].variables") for name in content["arrays"])
    return {name.partition(".value")[0] for name in names if ".value" in name}


def _with_scaled(tree: Any, boxed: Collection[str], at: str = "") -> Any:
    """Nested dicts, with a `ScaledArray` for each dict of codes and the bits of their scales, and what is in
    the box at each path of `boxed`."""
    if not isinstance(tree, dict):
        return tree
    if at in boxed:
        return _with_scaled(tree["value"], ())
    if set(tree) == {"data", "scale"} and jnp.issubdtype(tree["scale"].dtype, jnp.unsignedinteger):
        return ScaledArray.tree_unflatten(None, (tree["data"], tree["scale"]))
    return {name: _with_scaled(child, boxed, f"{at}[{name!r}]") for name, child in tree.items()}


def _whole(folder: pathlib.Path, skipped: list[str]) -> Iterator[tuple[int, pathlib.Path, dict[str, Any]]]:
    """The steps, folders and metadata of checkpoints that are not damaged, from the newest on; appends the
    damage of others to `skipped`."""
    for step in reversed(distributed.decide(lambda: _steps(folder))):
        path = _path(folder, step)
        damage = _damage(path)
        if distributed.any_of(bool(damage)):
            skipped.append(f"{path}: {damage or 'a file is missing or damaged'}")
            continue
        content = json.loads((path / "run/metadata").read_text(encoding="utf-8"))
        if content["step"] != step:
            skipped.append(f"{path}: it is the checkpoint of step {content['step']} under another name")
            continue
        yield step, path, content


def _restored(path: pathlib.Path, like: PyTree) -> tuple[PyTree, str]:
    """The state of a checkpoint, and "" or why its arrays cannot be read."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    try:
        return _read(path, shapes), ""
    except Exception as error:  # tensorstore raises many types
        if distributed.is_loss(error) or isinstance(error, jax.errors.JaxRuntimeError):
            raise  # as for a lack of memory
        return None, f"its arrays cannot be read ({_reason(error)})"


def _read(path: pathlib.Path, shapes: PyTree) -> PyTree:
    """Reads the arrays of a checkpoint. Writes and deletes nothing: its run may be saving another one."""
    args = ocp.checkpoint_utils.construct_restore_args(shapes)
    args = ocp.args.PyTreeRestore(shapes, restore_args=args, partial_restore=True)
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path / "state", args=args)


def last_step(folder: pathlib.Path) -> int:
    """The step of the newest checkpoint, damaged or not; 0 if there is none."""
    return max(_steps(folder), default=0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of orbax, and the tracebacks that its threads print for each part of an error."""
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    was_off, log.disabled, sys.unraisablehook = log.disabled, True, lambda args: None
    try:
        yield
        sys.unraisablehook = hook  # after an error the threads go on for a while
    finally:
        log.disabled = was_off


def _path(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"step_{step:08d}"


def _steps(folder: pathlib.Path) -> list[int]:
    """The steps of all checkpoints, damaged or not, in ascending order."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(name[5:]) for name in os.listdir(folder) if re.fullmatch(r"step_\d{8,18}", name))
    return []


def _make_room(folder: pathlib.Path, step: int) -> None:
    """Renames checkpoints of this step and later ones; they are damaged, or the run would be beyond them.

    Links to checkpoints that orbax would delete are deleted: orbax fails there.
    """
    for path in (_path(folder, later) for later in _steps(folder) if later >= step):
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        if aside.is_symlink():
            aside.unlink()
        path.rename(aside)
    for path in (_path(folder, earlier) for earlier in _steps(folder)[: 1 - MAX_TO_KEEP]):
        if path.is_symlink():
            path.unlink()


def _write_checksums(path: pathlib.Path) -> None:
    """Writes the SHA-256 of the files of this process: its own shards, and in process 0 all common files."""
    index, files = jax.process_index(), {}
    for file in sorted(path.rglob("*")):
        owner = re.search(r"/ocdbt\.process_(\d+)/", file.as_posix())
        if file.is_file() and (int(owner[1]) if owner else 0) == index and "sha256" not in file.name:
            files[file.relative_to(path).as_posix()] = _sha256(file)
    text = json.dumps({"processes": jax.process_count(), "files": files}, indent=1)
    (path / f"sha256.{index}.json").write_text(text)


def _damage(path: pathlib.Path) -> str:
    """The damage of a checkpoint that this process finds in its share of the files, or ""."""
    try:
        found = [json.loads(file.read_text()) for file in sorted(path.glob("sha256.*.json"))]
        files = sorted((name, digest) for one in found for name, digest in one["files"].items())
        if len(found) != found[0]["processes"] or "run/metadata" not in dict(files):
            raise ValueError
    except (OSError, RecursionError, LookupError, TypeError, ValueError, AttributeError):
        return "its checksums are missing or damaged"
    share = files[jax.process_index() :: jax.process_count()]
    damaged = next((name for name, digest in share if not _is_whole(path / name, digest)), None)
    return f"{damaged} is missing or damaged" if damaged else ""


def _is_whole(file: pathlib.Path, digest: str) -> bool:
    with contextlib.suppress(OSError):
        return _sha256(file) == digest
    return False


def _sha256(file: pathlib.Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _arrays(state: PyTree) -> dict[str, str]:
    """The path of each array of a state -> its dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _as_saved(like: PyTree, content: dict[str, Any]) -> PyTree:
    """The tree with a checkpoint's paths: an earlier version had boxes of axis names around whole moments."""
    names = without_unread(content["arrays"]).keys()
    around = without_variables(like)
    return around if _arrays(like).keys() != names == _arrays(around).keys() else like


def _check(path: pathlib.Path, content: dict[str, Any], like: PyTree, run: str) -> None:
    if run and content["run"] != run:
        raise ValueError(f"{path} is of another run, with other settings or data; move it away and resume")
    found, expected = without_unread(content["arrays"]), _arrays(like)
    for name in sorted(found.keys() | expected.keys()):
        there, here = found.get(name, "nothing"), expected.get(name, "nothing")
        if there != here:
            raise ValueError(
                f"{path} is of another model or recipe: its {name} is {there}, this run's is {here}; "
                + _advice(_models(found), _models(expected))
            )


def _models(names: Iterable[str]) -> set[str]:
    """The indices of the models that arrays of `fit` belong to, as "[0]"."""
    return {index[0] for name in names if (index := re.match(r"\[\d+\]", name))}


def _advice(saved: set[str], given: set[str]) -> str:
    if saved and not given:
        return (
            "`fit` saves a list with a state for each model, so expected `like=[trainer.like]`; got a state"
        )
    if len(saved) != len(given):
        return f"it has {len(saved)} models, and {len(given)} are given; leave `twin` as it was"
    return "resume with the settings that the run began with"


def _reason(error: Exception) -> str:
    """The system's words in an error of kilobytes, or its beginning."""
    text = " ".join(str(error).split())
    return next((words for words in _REASONS if words in text), text[:200])
