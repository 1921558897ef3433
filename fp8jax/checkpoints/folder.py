"""Folders of Hugging Face: `config.json`, and tensors in one or more safetensors files.

    writer = Writer(folder, max_shard_bytes)     # writer.add(name, array), writer.finish()
    stored = read(folder)                        # stored.config, stored.entries[name].array()

Reading checks everything that the files say before it reads a tensor. Nothing is executed or written.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from fp8jax.extras import need
from fp8jax.formats import E4M3, E8M0

CONFIG, ONE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_LONGEST = 200  # characters of a name

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": E4M3.dtype,
    "F8_E8M0": E8M0.dtype,
    "U8": np.dtype(np.uint8),
}


class Writer:
    """Writes tensors into files of a limited size, which hold at least one tensor each."""

    def __init__(self, folder: pathlib.Path, max_bytes: int) -> None:
        self._save = need("safetensors.numpy", "serving").save_file
        self._folder, self._limit = folder, max_bytes
        self._pending: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds a tensor."""
        if self._pending and sum(x.nbytes for x in self._pending.values()) + array.nbytes > self._limit:
            self._flush()
        self._pending[name] = np.ascontiguousarray(array).reshape(array.shape)

    def _flush(self) -> None:
        file = self._folder / str(len(self._files))
        self._save(self._pending, file, metadata={"format": "pt"})
        file.chmod(self._folder.stat().st_mode & 0o666)  # by the umask; safetensors 0.8.0 has 0600
        self._files.append(list(self._pending))
        self._total += sum(x.nbytes for x in self._pending.values())
        self._pending = {}

    def finish(self) -> None:
        """Gives the files their names, and writes the index of several files."""
        self._flush()
        count = len(self._files)
        if count == 1:
            (self._folder / "0").rename(self._folder / ONE)
            return
        files = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / str(number)).rename(self._folder / file)
            files |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": files}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class Entry(NamedTuple):
    """A tensor in a file."""

    file: pathlib.Path
    dtype_name: str  # of safetensors
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype:
        """One of `DTYPES`; KeyError for other names."""
        return DTYPES[self.dtype_name]

    def array(self) -> Shaped[np.ndarray, "..."]:
        """The tensor, read from the file."""
        flat = np.fromfile(
            self.file, np.uint8, math.prod(self.shape) * self.dtype.itemsize, offset=self.start
        )
        return flat.view(self.dtype).reshape(self.shape)


class Folder(NamedTuple):
    """The config, and the tensors by name, which may have dtypes that no parameter has."""

    config: dict[str, Any]
    entries: dict[str, Entry]


def read(folder: pathlib.Path) -> Folder:
    """The config and the headers of a folder.

    Raises:
        ValueError: a file is missing or broken, the index names another folder's file, or two files have the
            same tensor.
    """
    config = _json(folder / CONFIG)
    if (folder / INDEX).exists():
        files = _json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError(f"`folder`: expected a `weight_map` of names and files in {INDEX}; got none.")
        for name, file in files.items():
            is_own = isinstance(file, str) and file == pathlib.Path(file).name and _is_name(name, file)
            if not is_own or not file.endswith(".safetensors"):
                raise ValueError(
                    f"`folder`: expected names of safetensors files of the folder in {INDEX}; got "
                    f"{file!r:.99} for {name!r:.99}. Do not load a folder from a source that you do not "
                    "trust."
                )
    else:
        files = dict.fromkeys([""], ONE)
    entries: dict[str, Entry] = {}
    for file in sorted(set(files.values())):
        for name, entry in _header(folder / file):
            if name in entries:
                raise ValueError(
                    f"`folder`: expected {name} in one file; got it in {entries[name].file.name} and {file}."
                )
            entries[name] = entry
    missing = [
        name for name in files if name and (name not in entries or entries[name].file.name != files[name])
    ]
    if missing:
        raise ValueError(
            f"`folder`: expected {missing[0]} in {files[missing[0]]}, as {INDEX} says; got none there. "
            "Copy the folder again."
        )
    return Folder(config, entries)


def _json(file: pathlib.Path) -> dict[str, Any]:
    try:
        if file.exists() and not file.is_file():  # a named pipe would be waited for
            raise ValueError("no file")
        found = json.loads(file.read_bytes(), object_pairs_hook=_once)
    except FileNotFoundError:
        raise ValueError(
            f"`folder`: expected {file.name} in {file.parent}; got no such file. Give the folder of a "
            "Hugging Face model."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"`folder`: expected JSON in {file.name}; got {_line(error)}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"`folder`: expected a JSON object in {file.name}; got {type(found).__name__}.")
    return found


def _header(file: pathlib.Path) -> Iterator[tuple[str, Entry]]:
    """The tensors of a file. safetensors checks the header: its size, dtypes, shapes, and that tensors fill
    the file."""
    library = need("safetensors", "serving")
    if not file.is_file():
        raise ValueError(f"`folder`: expected {file.name} in {file.parent}; got no such file. Copy it again.")
    try:
        with library.safe_open(file, "np"):
            pass
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: Mapping[str, Any] = json.loads(opened.read(size), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError, library.SafetensorError) as error:
        raise ValueError(
            f"`folder`: expected a safetensors file in {file.name}; got {_line(error)}. Copy it again."
        ) from None
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if not _is_name(name):
            raise ValueError(
                f"`folder`: expected names of at most {_LONGEST} printable characters in {file.name}; got "
                f"{name[:99]!r}."
            )
        yield name, Entry(file, about["dtype"], tuple(about["shape"]), 8 + size + about["data_offsets"][0])


def _is_name(*names: str) -> bool:
    """Whether names are short, and have no line breaks, as files or in errors."""
    return all(len(name) <= _LONGEST and name.isprintable() for name in names)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError for a name that it has twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name in found if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r} twice")
    return found


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
