"""YAML files of limited size, depth and aliases, and with each key once.

text = read_text("run.yaml")

A few lines of aliases can stand for gigabytes, and deep nesting ends Python's stack. YAML's loaders take the
last of two equal keys and say nothing. In keys - counts as _.
"""

import dataclasses
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
        ValueError: the path is no file, or the file is not UTF-8, goes beyond a limit, or has a key twice in
            one block.
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
    if reason := _problem(text):
        raise ValueError(f"{name} {reason}")
    return text


@dataclasses.dataclass
class _Block:
    """A block of a file, so far."""

    anchor: Any = None
    keys: set[str] | None = None  # None for a list
    values: int = 0  # in it and in the blocks within
    parts: int = 0  # keys and values of its own


def _problem(text: str) -> str:
    """The fault of a text, such as the limit that it goes beyond; "" for a text without one."""
    import yaml

    sizes: dict[str, int] = {}  # anchor -> values, of the blocks that are closed
    blocks = [_Block()]  # those that are open
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            size, line = 1, event.start_mark.line + 1
            if isinstance(event, yaml.CollectionStartEvent):
                keys = set() if isinstance(event, yaml.MappingStartEvent) else None
                blocks.append(_Block(event.anchor, keys, parts=-1))
            elif isinstance(event, yaml.CollectionEndEvent):
                size = sizes[blocks[-1].anchor] = blocks[-1].values
                blocks.pop()
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor in [block.anchor for block in blocks]:
                    return f"has an alias *{event.anchor} within its own block"
                size = sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                sizes[event.anchor] = 1
                if blocks[-1].keys is not None and blocks[-1].parts % 2 == 0:
                    key = event.value.replace("-", "_")
                    if key in blocks[-1].keys:
                        return f"says `{event.value}` twice, again in line {line}; leave one of them out"
                    blocks[-1].keys.add(key)
            blocks[-1].parts += 1
            blocks[-1].values += size
            if len(blocks) > DEPTH:
                return f"is nested deeper than {DEPTH} blocks in line {line}"
            if blocks[-1].values > VALUES:
                return f"has more than {VALUES:,} values, if each alias counts as what it stands for"
    except yaml.YAMLError:
        pass  # the parser will say it
    return ""
