"""Text as characters, as in nanoGPT's `shakespeare_char`: the corpus of the examples.

    text = load("shakespeare.txt")                 # or load(""): the source of Python's standard library
    rows = RandomWindows(text.train, context=64, batch=12, steps=500, seed=0)
    rows[7]                                        # shape=(65,), int32: inputs and, shifted by one, targets
    rows.step(0)                                   # shape=(12, 65): rows 0 to 11

    python examples/corpus.py library.txt          # writes the source of the whole library

The vocabulary is the sorted set of the characters. The first 90% of the text are for training, the rest for
validation.
"""

import argparse
import functools
import hashlib
import pathlib
import stat
import sysconfig
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Integer, UInt

TRAINING_SHARE = 0.9
LIBRARY_CHARACTERS = 1_500_000  # minutes of reading for a small model
# Bytes that text hardly has: control characters other than white space, backspace and escape.
_CONTROLS = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})


class Text(NamedTuple):
    """A tokenized text."""

    name: str  # for people
    vocabulary: str  # sorted; a token is the index of its character
    train: UInt[np.ndarray, " characters"]
    validation: UInt[np.ndarray, " characters"]


def load(path: str, characters: int = LIBRARY_CHARACTERS) -> Text:
    """Reads and tokenizes a text.

    Args:
        path: any file, or "" for the source of this Python's standard library. A file that is not UTF-8 is
            read as Latin-1: each byte is one character.
        characters: the most that are read of the standard library.

    Raises:
        ValueError: the file cannot be read, is empty, or holds no text.
    """
    name, content = (
        (path, _read(path)) if path else ("Python's standard library", standard_library(characters))
    )
    codes = np.frombuffer(content.encode("utf-32-le"), np.uint32)
    vocabulary, tokens = np.unique(codes, return_inverse=True)
    tokens = tokens.astype(np.min_scalar_type(len(vocabulary)))
    split = int(len(tokens) * TRAINING_SHARE)
    return Text(
        name=name,
        vocabulary="".join(map(chr, vocabulary)),
        train=tokens[:split],
        validation=tokens[split:],
    )


def _read(path: str) -> str:
    try:
        mode = pathlib.Path(path).stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(None, "it is no file")  # /dev/zero has no end, and a pipe may have no writer
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--data {path} cannot be read ({error.strerror}); give a text file") from None
    if not content:
        raise ValueError(f"--data {path} is empty; give a text file")
    if b"\0" in content or len(content.translate(None, _CONTROLS)) < 0.99 * len(content):
        raise ValueError(f"--data {path} is a binary file, or in UTF-16; give a text file in UTF-8")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def standard_library(limit: int | None = LIBRARY_CHARACTERS, modules: str = "*.py") -> str:
    """The first `limit` characters of the top-level modules of the standard library, in alphabetical order.

    A character that is neither printable ASCII nor a line break becomes one replacement character. So the
    vocabulary is small and the same on every machine. `modules="**/*.py"` takes the modules of packages, too,
    but not those that pip installed; some Pythons come without their own tests, more than half of that text.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces, length = [], 0
    for path in sorted(folder.glob(modules)):
        if {"site-packages", "dist-packages"} & {*path.relative_to(folder).parts}:
            continue
        pieces.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(pieces[-1])
        if limit is not None and length >= limit:
            break
    if not pieces:
        raise ValueError(f"this Python has no source of its standard library in {folder}; give --data FILE")
    characters = "".join(pieces)[:limit]
    return "".join(c if " " <= c <= "~" or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def check_length(text: Text, batch: int, context: int) -> None:
    """Raises ValueError if a part of the text is too short for a batch."""
    needed = {"training": batch * context + 1, "validation": context + 1}
    for part, tokens in (("training", text.train), ("validation", text.validation)):
        if len(tokens) < needed[part]:
            raise ValueError(
                f"--data {text.name} is too short: its {part} part has {len(tokens)} characters, and "
                f"--batch {batch} with --context {context} needs {needed[part]}; give a longer text or "
                "smaller --batch and --context"
            )


class RandomWindows:
    """Windows at random places of a text, by number: row i is row i % batch of step i // batch.

    A row depends only on the arguments, so a resumed run and a twin see the same batches. Read it without
    shuffling.

    Args:
        tokens: n > context of them.
        context: tokens that the model sees; a window has one more, the last target.
        batch: windows of a step.
        steps: number of batches.
        seed: of the places.
        purpose: another purpose has other places.
        vocabulary: of the text, for the fingerprint: other characters may have the same tokens.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, " n"],
        context: int,
        batch: int,
        steps: int,
        seed: int,
        purpose: str = "train",
        vocabulary: str = "",
    ) -> None:
        self._tokens, self.context, self._batch, self._steps = tokens, context, batch, steps
        self._seed = seed, zlib.crc32(purpose.encode())
        self.step = functools.lru_cache(maxsize=4)(self._step)
        self.fingerprint = hashlib.sha256(vocabulary.encode() + tokens.tobytes()).hexdigest()

    def __len__(self) -> int:
        return self._batch * self._steps

    def __getitem__(self, index: int) -> Int32[np.ndarray, " context+1"]:
        """Window number `index`."""
        step, row = divmod(index, self._batch)
        return self.step(step)[row]

    def _step(self, number: int) -> Int32[np.ndarray, "batch context+1"]:
        """The batch of step `number`, from 0."""
        starts = np.random.default_rng((*self._seed, number)).integers(
            len(self._tokens) - self.context, size=self._batch
        )
        return self._tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)


def windows(
    tokens: Integer[np.ndarray, " n"], batch: int, context: int, most: int
) -> Int32[np.ndarray, "windows context+1"]:
    """Windows of `tokens` side by side, or evenly spaced if they are too many.

    Args:
        tokens: n > context of them.
        batch: windows in a batch. Fewer windows than a batch at the end are left out; if there is no whole
            batch, windows are repeated.
        context: as in `RandomWindows`.
        most: the largest number of batches.
    """
    available = (len(tokens) - 1) // context
    count = batch * min(most, max(available // batch, 1))
    starts = np.arange(count) * available // count * context
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the text of the whole library."""
    parser = argparse.ArgumentParser(description="Write the source of Python's standard library as one text.")
    parser.add_argument(
        "file", type=pathlib.Path, help="a new file; about 30 MB, less without Python's tests"
    )
    file = parser.parse_args(argv).file
    if file.exists():
        parser.error(f"expected a new file; got {file}, which exists")
    file.write_text(standard_library(None, "**/*.py"), encoding="utf-8")


if __name__ == "__main__":
    main()
