"""YAML files of limited size and depth, without aliases, and with each key once.

text = read_text("run.yaml")

A few lines of aliases can stand for gigabytes, and deep nesting ends Python's stack. YAML's loaders take the
last of two equal keys and say nothing. In keys - counts as _.
"""

import itertools
import os
import pathlib
import stat

BYTES = 100_000
DEPTH = 20  # blocks within blocks


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a YAML file that can be parsed at no risk. Whether it is YAML, the parser says.

    Raises:
        ValueError: the path is no file, or the file is not UTF-8, goes beyond a limit, or has an alias, or a
            key twice in one block.
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


def _problem(text: str) -> str:
    """The fault of a text, such as the limit that it goes beyond; "" for a text without one."""
    import yaml

    kinds = {yaml.MappingStartEvent: (True, False), yaml.SequenceStartEvent: (False,)}
    # The keys of each open block, and whether its next node is a key.
    blocks = [(set[str](), itertools.cycle((False,)))]
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                return f"has the alias *{event.anchor} in line {line}; write the value again in its place"
            if isinstance(event, yaml.CollectionEndEvent):
                blocks.pop()
            elif isinstance(event, yaml.NodeEvent):
                keys, is_key = blocks[-1]
                if next(is_key) and isinstance(event, yaml.ScalarEvent):
                    if (key := event.value.replace("-", "_")) in keys:
                        return f"says `{event.value}` twice, again in line {line}; leave one of them out"
                    keys.add(key)
                if type(event) in kinds:
                    blocks.append((set(), itertools.cycle(kinds[type(event)])))
            if len(blocks) > DEPTH:
                return f"is nested deeper than {DEPTH} blocks in line {line}"
    except yaml.YAMLError:
        pass  # the parser will say it
    return ""
