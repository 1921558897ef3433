"""A corpus of token ids in a file; only the windows that are read are in memory.

    write_tokens("train.npy", map(encode, documents), dtype=np.uint16)   # ids, or arrays of ids
    windows = TokenFile("train.npy", context=1024)
    windows[7]                      # shape=(1025,), int32: inputs and, shifted by one, targets
    TokenFile("train.bin", context=1024, dtype=np.uint16)                # raw ids, as nanoGPT writes them

The file is one array in NumPy's own format. Windows lie side by side: the last target of a window is the
first input of the next, so every token but the first is a target once. A tail shorter than a window is left
out.
"""

import functools
import itertools
import operator
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32

DTYPES = (np.dtype("<u2"), np.dtype("<u4"))
_MAGIC = b"\x93NUMPY"  # how files in NumPy's format begin
_LLM_C = {20240520: "uint16", 20240801: "uint32"}  # how llm.c's files begin, and what their ids are
_LARGEST = 2**31 - 1  # a window is int32, as models take it
_CHUNK = 1 << 20  # ids


def write_tokens(
    path: str | os.PathLike[str],
    tokens: Iterable[Any],
    dtype: Any = np.uint16,
    *,
    vocabulary: int | None = None,
) -> int:
    """Writes token ids to a file, which appears under its name when it is complete.

    Args:
        path: of the file; an existing file is replaced.
        tokens: whole numbers, or arrays or lists of them (documents), which are concatenated. They are read
            once and never held as a whole.
        dtype: uint16 for ids below 65536, or uint32.
        vocabulary: ids must be below it; None for the range of the dtype, up to 2**31 - 1.

    Returns:
        The number of tokens.

    Raises:
        ValueError: another dtype, or an id out of range.
        TypeError: a token is not a whole number.
    """
    path, kind = pathlib.Path(path), _checked_dtype(dtype)
    limit = min(np.iinfo(kind).max, _LARGEST) + 1
    limit = limit if vocabulary is None else min(limit, vocabulary)
    partial = path.with_name(f".writing-{path.name}")
    count = 0
    try:
        with open(partial, "wb") as file:
            _write_header(file, kind, 0)
            for chunk in _chunks(tokens):
                _check_ids(chunk, limit, count, "`tokens`")
                file.write(chunk.astype(kind).tobytes())
                count += len(chunk)
            file.seek(0)
            _write_header(file, kind, count)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


class TokenFile:
    """The windows of a file of token ids: a sequence that is read from the disk when it is indexed.

    It pickles as its arguments, so a worker process opens the file itself.

    Args:
        path: of a file that `write_tokens` or `np.save` wrote, or of raw little-endian ids.
        context: tokens that the model sees; a window has one more, the last target.
        dtype: uint16 or uint32, for raw ids only.
        vocabulary: ids must be below it; checked when windows are read. For an id out of range, JAX's gather
            would silently take the last row of an embedding.

    Raises:
        ValueError: the file is missing or cut off, holds no token ids, has a header of llm.c, or is shorter
            than one window.
    """

    def __init__(
        self, path: str | os.PathLike[str], context: int, *, dtype: Any = None, vocabulary: int | None = None
    ) -> None:
        if context < 1:
            raise ValueError(f"`context` must be at least 1; got {context}")
        self.path = pathlib.Path(path).resolve()  # a worker may have another working directory
        self.context, self.vocabulary = context, vocabulary
        self._dtype = dtype
        self.tokens = _open(self.path, dtype)
        if len(self.tokens) <= context:
            raise ValueError(
                f"{self.path} has {len(self.tokens)} tokens, and a window with `context` {context} needs "
                f"{context + 1}; give a longer file or a smaller `context`"
            )

    def __reduce__(self) -> Any:
        options = {"dtype": self._dtype, "vocabulary": self.vocabulary}
        return functools.partial(TokenFile, **options), (self.path, self.context)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.context}): {len(self)} windows of {self.tokens.dtype}"

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: Any) -> Int32[np.ndarray, " context+1"]:
        """Window number `index`.

        Raises:
            IndexError: there are fewer windows.
            ValueError: it holds an id that is not below the vocabulary.
        """
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"window {number} of {len(self)} in {self.path}")
        start = number % len(self) * self.context
        window = self.tokens[start : start + self.context + 1]
        limit = _LARGEST + 1 if self.vocabulary is None else self.vocabulary
        _check_ids(window, limit, start, str(self.path))
        return window.astype(np.int32)


def _open(path: pathlib.Path, dtype: Any) -> np.ndarray:
    """The ids, memory-mapped."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); `write_tokens` makes such a file"
        ) from None
    if kind := _LLM_C.get(int.from_bytes(start[:4], "little")):
        raise ValueError(
            f"{path} begins with llm.c's header of 1,024 bytes, which holds no ids; write a file without it: "
            f"`write_tokens(new, np.memmap(path, {kind!r}, 'r', 1024), {kind!r})`"
        )
    if start != _MAGIC:
        return _open_raw(path, dtype)
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is cut off or damaged ({error}); write it again") from None
    if tokens.ndim != 1 or tokens.dtype not in DTYPES:
        raise ValueError(
            f"{path} must hold uint16 or uint32 of shape (tokens,); got {tokens.dtype} of shape "
            f"{tokens.shape}"
        )
    if dtype is not None and _checked_dtype(dtype) != tokens.dtype:
        raise ValueError(f"{path} holds {tokens.dtype}, and `dtype` is {np.dtype(dtype)}; leave it out")
    return tokens


def _open_raw(path: pathlib.Path, dtype: Any) -> np.ndarray:
    if dtype is None:
        raise ValueError(
            f"{path} does not say what its ids are: give `dtype`, np.uint16 for nanoGPT's .bin files, or "
            "write it with `write_tokens`"
        )
    kind, size = _checked_dtype(dtype), path.stat().st_size
    if size % kind.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, no multiple of the {kind.itemsize} of {kind}; it is cut off, or "
            "`dtype` is another"
        )
    return np.memmap(path, kind, "r") if size else np.empty(0, kind)  # an empty file cannot be mapped


def _checked_dtype(dtype: Any) -> np.dtype:
    kind = np.dtype(dtype)
    if kind not in DTYPES:
        raise ValueError(f"`dtype` must be np.uint16 or np.uint32, little-endian; got {kind}")
    return kind


def _write_header(file: Any, dtype: np.dtype, count: int) -> None:
    """NumPy pads the header for any `count`, so it can be written again when the count is known."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def _chunks(tokens: Iterable[Any]) -> Iterator[np.ndarray]:
    """The ids in integer arrays of shape (n,): single ids together, documents as they are."""
    if isinstance(tokens, np.ndarray):
        tokens = np.array_split(tokens, max(len(tokens) // _CHUNK, 1))
    for is_single, group in itertools.groupby(tokens, np.isscalar):
        for piece in _lists(group) if is_single else group:
            chunk = np.asarray(piece).ravel()
            if len(chunk) and chunk.dtype.kind not in "iu":
                raise TypeError(f"`tokens` must be whole numbers, or arrays of them; got {chunk.dtype}")
            yield chunk


def _lists(tokens: Iterator[Any]) -> Iterator[list[Any]]:
    while piece := list(itertools.islice(tokens, _CHUNK)):
        yield piece


def _check_ids(ids: np.ndarray, limit: int, start: int, where: str) -> None:
    """Raises ValueError for the first id that is not in 0 <= id < limit."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
        first = int(np.argmax((ids < 0) | (ids >= limit)))
        raise ValueError(
            f"{where}: token {start + first} is {ids[first]}, and ids must be at least 0 and below {limit}; "
            "give the `vocabulary` or the `dtype` that the tokens were made for"
        )
