"""Text as characters, and batches that depend on nothing but a seed and a step.

    text = load("shakespeare.txt")                 # or load(""): the standard library's source
    x_and_y = batch(text.train, seed=(0, "train", 7), size=12, context=64)   # shape=(12, 65)

The vocabulary is the sorted set of the text's characters, the first 90% are for training and
the rest for validation, as in nanoGPT's `shakespeare_char`. Since a batch is a pure function,
a resumed run and a twin see the same batches in the same order without any state being kept.
"""

import hashlib
import pathlib
import sysconfig
import zlib
from typing import NamedTuple

import numpy as np

from fp8jax.train.config import read_file

TRAINING_SHARE = 0.9
# Bytes that text has hardly: control characters but white space, backspace and escape.
_CONTROLS = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})
LIBRARY_BYTES = 1_500_000  # of the standard library's source: minutes of reading for a small model


class Text(NamedTuple):
    """A tokenized text."""

    name: str  # where it came from, for people
    vocabulary: str  # sorted; a token is a character's index in it
    train: np.ndarray  # shape=(characters,), unsigned
    validation: np.ndarray  # shape=(characters,), unsigned
    fingerprint: str  # the same for the same characters

    def decode(self, tokens: np.ndarray) -> str:
        """The characters of `tokens`."""
        return "".join(self.vocabulary[token] for token in tokens)


def load(path: str) -> Text:
    """Reads and tokenizes a text.

    Args:
        path: any file, or "" for the source of this Python's standard library. A file that
            is not UTF-8 is read byte by byte: each byte is one character.

    Raises:
        ValueError: the file cannot be read, is empty, or holds no text.
    """
    name, characters = (path, _read(path)) if path else ("Python's standard library", standard_library())
    codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    vocabulary, tokens = np.unique(codes, return_inverse=True)
    tokens = tokens.astype(np.min_scalar_type(len(vocabulary)))
    split = int(len(tokens) * TRAINING_SHARE)
    return Text(
        name=name,
        vocabulary="".join(map(chr, vocabulary)),
        train=tokens[:split],
        validation=tokens[split:],
        fingerprint=hashlib.sha256(codes.tobytes()).hexdigest(),
    )


def _read(path: str) -> str:
    try:
        content = read_file(path)
    except FileNotFoundError:
        raise ValueError(f"--data {path}: no such file; give the path of a text file") from None
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


def standard_library(limit: int = LIBRARY_BYTES) -> str:
    """The top-level modules of this Python's standard library in alphabetical order, `limit` characters.

    What is neither printable ASCII nor a line break becomes one replacement character: the
    vocabulary is then the same on every machine, and small.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces, length = [], 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_text(encoding="utf-8", errors="replace"))
        length += len(pieces[-1])
        if length >= limit:
            break
    if not pieces:
        raise ValueError(f"this Python keeps no source of its standard library in {folder}; give --data FILE")
    characters = "".join(pieces)[:limit]
    return "".join(c if " " <= c <= "~" or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def check_length(text: Text, size: int, context: int) -> None:
    """Raises ValueError if a part of the text is too short to draw a batch from."""
    needed = {"training": size * context + 1, "validation": context + 1}
    for part, tokens in (("training", text.train), ("validation", text.validation)):
        if len(tokens) < needed[part]:
            raise ValueError(
                f"--data {text.name} is too short: its {part} part has {len(tokens)} characters, and "
                f"--batch {size} with --context {context} needs {needed[part]}; give a longer text or "
                "smaller --batch and --context"
            )


def batch(tokens: np.ndarray, seed: tuple[int, str, int], size: int, context: int) -> np.ndarray:
    """Windows of `tokens` at random places: a pure function of its arguments.

    Args:
        tokens: shape=(n,), n > context.
        seed: the run's seed, what the batch is for, and the number of the batch.
        size: number of windows.
        context: tokens that the model sees; a window has one more, the last target.

    Returns:
        int32 array of shape (size, context + 1).
    """
    run, purpose, number = seed
    random = np.random.default_rng((run, zlib.crc32(purpose.encode()), number))
    starts = random.integers(len(tokens) - context, size=size)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def windows(tokens: np.ndarray, size: int, context: int, most: int) -> list[np.ndarray]:
    """All of `tokens` in batches of windows side by side, or evenly spaced ones if they are too many.

    Args:
        tokens: shape=(n,), n > context.
        size: windows per batch.
        context: as in `batch`.
        most: number of batches.

    Returns:
        At most `most` int32 arrays of shape (size, context + 1). Fewer than `size` windows are left
        out, or, if there are no more, seen twice.
    """
    available = (len(tokens) - 1) // context
    batches = min(most, max(available // size, 1))
    starts = np.arange(batches * size) * available // (batches * size) * context
    chosen = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return list(chosen.reshape(batches, size, context + 1))
