"""YAML files of limited size, depth and aliases.

text = read_text("run.yaml")

A few lines of aliases can stand for gigabytes, and deep nesting ends Python's stack.
"""

import os
import pathlib
import stat
from typing import Any

BYTES = 100_000
DEPTH = 20  # blocks within blocks
VALUES = 10_000  # with each alias as the values that it stands for


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a YAML file that can be parsed at no risk. Whether it is YAML, the parser says.

    Raises:
        ValueError: the path is no file, or the file is not UTF-8 or goes beyond a limit.
        OSError: the file cannot be read.
        ImportError: PyYAML is not installed.
    """
    file, name = pathlib.Path(path), os.fspath(path)
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{name} is no file; give a YAML file")
    if (size := file.stat().st_size) > BYTES:
        raise ValueError(f"{name} has {size:,} bytes; expected a YAML file of at most {BYTES:,}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is no YAML: it is not UTF-8 text") from None
    if reason := _excess(text):
        raise ValueError(f"{name} {reason}")
    return text


def _excess(text: str) -> str:
    """The limit that a text goes beyond, or ""."""
    import yaml

    sizes: dict[str, int] = {}  # anchor -> values, of the blocks that are closed
    blocks: list[list[Any]] = [[None, 0]]  # anchor and values so far, of the blocks that are open
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            size = 1
            if isinstance(event, yaml.CollectionStartEvent):
                blocks.append([event.anchor, 0])
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, size = blocks.pop()
                sizes[anchor] = size
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor in [anchor for anchor, _ in blocks]:
                    return f"has an alias *{event.anchor} within its own block"
                size = sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                sizes[event.anchor] = 1
            blocks[-1][1] += size
            if len(blocks) > DEPTH:
                return f"is nested deeper than {DEPTH} blocks in line {event.start_mark.line + 1}"
            if blocks[-1][1] > VALUES:
                return f"has more than {VALUES:,} values, if each alias counts as what it stands for"
    except yaml.YAMLError:
        pass  # the parser will say it
    return ""
