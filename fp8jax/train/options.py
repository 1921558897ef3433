"""Options: dataclass fields with help and limits, read from YAML files and the command line by jsonargparse.

@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = option(10, "optimizer steps", least=1)

    def __post_init__(self) -> None:
        validate(self)

Config(**read(Config, ["--config", "run.yaml", "--steps", "3"]))
"""

import argparse
import dataclasses
import difflib
import functools
import json
import math
import numbers
import os
import re
import reprlib
import sys
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from fp8jax.extras import need
from fp8jax.recipe import yaml_file


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    below: float = math.inf,
    choices: Collection[str] = (),
    saved: bool = True,
    fixed: bool = True,
) -> Any:
    """A field of a configuration.

    Args:
        default: its value if none is given.
        help: its line of `--help`.
        least, below: a number must satisfy least <= value < below.
        choices: the legal words.
        saved: a run keeps its value; False for an option of one start of the program, as `--resume`.
        fixed: a resumed run must have the same value.
    """
    rules = {"least": least, "below": below, "choices": tuple(choices), "saved": saved, "fixed": fixed}
    return dataclasses.field(default=default, metadata={"help": help, **rules})


# An option of one start of the program: a run does not keep its value.
start_option = functools.partial(option, saved=False)


def saved_options(config: Any) -> dict[str, Any]:
    """The values that a run keeps, as JSON gives them back."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata["saved"]}
    return json.loads(json.dumps(values, default=lambda x: x.item() if hasattr(x, "item") else str(x)))


def fixed_options(cls: Any) -> set[str]:
    """The names of the options that a resumed run cannot change."""
    return {f.name for f in dataclasses.fields(cls) if f.metadata["saved"] and f.metadata["fixed"]}


def validate(config: Any) -> None:
    """Raises ValueError for the first option of a wrong type or out of its range; for `__post_init__`.

    Numbers of NumPy become Python's, which JSON can hold.
    """
    for field in dataclasses.fields(config):
        value, rules = getattr(config, field.name), field.metadata
        if not any(_is_a(value, kind) for kind in _types(field)):
            expected = " or ".join(kind.__name__ for kind in _types(field))
            raise ValueError(f"{_flag(field)} must be of type {expected}; got {reprlib.repr(value)}")
        if isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(config, field.name, value)
        if isinstance(value, str):
            if not value.isprintable():
                raise ValueError(f"{_flag(field)} must be printable text; got {value!a}")
            if rules["choices"] and value not in rules["choices"]:
                near, legal = _suggestion(value, rules["choices"]), ", ".join(rules["choices"])
                number = "a whole number or " if int in _types(field) else ""
                raise ValueError(f"{_flag(field)} must be {number}one of {legal}; got {value}{near}")
        elif rules["least"] is not None:
            # The counters on the devices are int32.
            end = 2**31 if rules["below"] == math.inf and int in _types(field) else rules["below"]
            if not rules["least"] <= value < end:
                limit = f" and below {end}" if end < math.inf else " and finite"
                raise ValueError(
                    f"{_flag(field)} must be at least {rules['least']:g}{limit}; got {reprlib.repr(value)}"
                )


def read(cls: type, argv: Sequence[str] | None = None, description: str = "") -> dict[str, Any]:
    """Reads the options that YAML files and the command line give.

    Args:
        cls: a dataclass with fields made by `option`.
        argv: the command line without the program's name; None for this process's.
        description: the first lines of `--help`.

    Returns:
        Field name -> value, of the options that were given. The command line wins over the files.

    Raises:
        ValueError: an unknown option, a value of a wrong type, or a file that cannot be read.
    """
    library = need("jsonargparse")
    parser = library.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", metavar="FILE", help="YAML file with these options")
    for field in sorted(dataclasses.fields(cls), key=lambda field: not field.metadata["saved"]):
        kind: dict[str, Any] = {"type": field.type}
        if field.type is bool:
            kind = {"action": library.ActionYesNo(yes_prefix="", no_prefix="no-")}
        help = field.metadata["help"].replace("%", "%%")
        parser.add_argument(_flag(field), default=field.default, help=help, **kind)
    argv = sys.argv[1:] if argv is None else list(argv)
    for word, value in zip(argv, [*argv, None][1:], strict=True):
        if word.startswith("--") and (value == "" or re.fullmatch(r"--[\w-]+=", word)):
            raise ValueError(f"{word.rstrip('=')} got an empty text; leave it out for its default")
    files, others = _without_files(argv)
    for path in files:
        _check_file(path)
        _parse(parser, cls, ["--config", path], f"--config {path}: ")  # an error in it names it
    given = _parse(parser, cls, [*(f"--config={path}" for path in files), *others])  # the last one wins
    given.pop("config", None)
    return given


def _parse(parser: Any, cls: type, argv: list[str], where: str = "") -> dict[str, Any]:
    """The options that are given; errors begin with `where`."""
    try:
        return vars(parser.parse_args(argv, defaults=False))
    except (argparse.ArgumentError, RecursionError, ValueError) as error:
        message = " ".join(str(error).split())[:400]
        unknown = re.search(r"unrecognized arguments: -+(\S+)|Option '(\S+)' is not accepted", message)
        flags = map(_flag, dataclasses.fields(cls))
        near = _suggestion(f"--{unknown[1] or unknown[2]}", flags) if unknown else ""
        raise ValueError(f"{where}{message}{near}; --help lists the options") from None


def _without_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """The values of --config on a command line, and its other words."""
    files, others, words = list[str](), list[str](), iter(argv)
    for word in words:
        value = next(words, None) if word == "--config" else None
        if word.startswith("--config="):
            value = word.partition("=")[2]
        if value is None:
            others.append(word)
        else:
            files.append(value)
    return files, others


def _check_file(path: str) -> None:
    """Raises ValueError for a file that cannot be read safely, or would be misread."""
    if not os.path.exists(path):
        if re.search(r"[:\[{\n]", path):
            raise ValueError("--config expects the path of a YAML file, not its content")
        raise ValueError(f"--config: File does not exist: {path!r}")
    try:
        text = yaml_file.read_text(path)
    except (OSError, ValueError) as error:
        reason = f"{path} cannot be read ({error.strerror})" if isinstance(error, OSError) else error
        raise ValueError(f"--config {reason}") from None
    if not text.strip():
        raise ValueError(f"--config {path} is empty; leave it out")
    if re.search(r"(?m)^config\s*:", text):
        raise ValueError(f"--config {path} names another file; give both on the command line")


def _suggestion(word: str, legal: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest legal word, or nothing."""
    near = difflib.get_close_matches(word, list(legal), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _types(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    return typing.get_args(field.type) or (field.type,)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether an option of this type can have the value. NumPy's numbers are numbers; booleans are not."""
    wider = {int: numbers.Integral, float: numbers.Real, str: str | os.PathLike}.get(kind, kind)
    return isinstance(value, wider) and (kind is bool or not isinstance(value, bool))
