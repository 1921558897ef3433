"""A program's settings: one frozen dataclass, filled by a YAML file and by the command line.

    @dataclass(frozen=True)
    class Config:
        steps: int = knob(1000, "optimizer steps", least=1)
        bias: bool = knob(False, "biases in the linear layers")

    given = read(Config, ["--config", "run.yaml", "--steps", "200"])   # {"bias": True, "steps": 200}
    config = Config(**given)

`read` gives only what was asked for, so that a resumed run can tell a setting that was asked
for from a default. The command line wins over the file. Every complaint is a ValueError whose
message is one line.
"""

import argparse
import dataclasses
import difflib
import math
import numbers
import os
import pathlib
import re
import reprlib
import stat
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from fp8jax.train.extras import need


def knob(
    default: Any, help: str, *, least: float | None = None, below: float = math.inf, kept: bool = True
) -> Any:
    """A dataclass field with its line of `--help`, and the range of a number: least <= value < below.

    One that is not `kept` is about a start of the program, not about the run: see `kept`.
    """
    metadata = {"help": help, "least": least, "below": below, "kept": kept}
    return dataclasses.field(default=default, metadata=metadata)


def kept(config: Any) -> dict[str, Any]:
    """The settings that a run keeps, however often it is started again."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata["kept"]}


def check_ranges(config: Any) -> None:
    """Raises ValueError for the first setting of a wrong type, or out of its knob's range.

    For `__post_init__`.
    """
    for field in dataclasses.fields(config):
        value, least, below = getattr(config, field.name), field.metadata["least"], field.metadata["below"]
        types = typing.get_args(field.type) or (field.type,)
        if not any(_is_a(value, type) for type in types):
            raise ValueError(f"--{_flag(field)} must be {_EXPECTED[field.type]}; got {reprlib.repr(value)}")
        if isinstance(value, str):
            if re.search("[\0-\x1f\ud800-\udfff]", value):  # what is no UTF-8 cannot be printed
                raise ValueError(f"--{_flag(field)} must be UTF-8 without control characters; got {value!a}")
        elif least is not None:
            # Without a limit of its own a whole number has that of a device's numbers.
            end = 2**31 if below == math.inf and int in types else below
            if not least <= value < end:
                limit = f" and below {end}" if below < math.inf or value >= end < math.inf else ""
                limit = limit or (" and finite" if not math.isfinite(value) else "")
                raise ValueError(
                    f"--{_flag(field)} must be at least {least:g}{limit}; got {reprlib.repr(value)}"
                )


def _is_a(value: Any, type: Any) -> bool:
    """Whether a setting can have the value; NumPy's numbers are numbers, and true is none."""
    kinds = {int: numbers.Integral, float: numbers.Real, str: str | os.PathLike}
    return isinstance(value, kinds.get(type, type)) and (type is bool or not isinstance(value, bool))


def read(cls: type, argv: Sequence[str] | None, description: str = "") -> dict[str, Any]:
    """The settings that a YAML file and the command line ask for.

    Args:
        cls: a dataclass whose fields are bool, int, float, str or `int | str`, made with `knob`.
        argv: the command line without the program's name; None for this process's own.
        description: first lines of `--help`.

    Returns:
        Field name -> value, for the fields that were given.

    Raises:
        ValueError: an unknown flag or key, a value of the wrong type, or an unreadable file.
    """
    given, unknown = _parser(cls, description).parse_known_args(argv)
    if unknown:
        raise ValueError(_unknown("option", unknown[0], [f"--{_flag(f)}" for f in dataclasses.fields(cls)]))
    from_command_line = vars(given)
    path = from_command_line.pop("config", None)
    return {**({} if path is None else _read_yaml(cls, path)), **from_command_line}


def suggest(word: str, legal: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest legal word, or nothing."""
    near = difflib.get_close_matches(word, list(legal), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


_METAVARS: dict[Any, str] = {float: "X", str: "TEXT"}
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    int | str: "a whole number or a word",
    float: "a number",
    str: "text (in quotes)",
}


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage and exits; here a complaint is an exception like any other."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:400]}; --help lists the options")


def _parser(cls: type, description: str) -> _Parser:
    parser = _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the options below")
    for field in sorted(dataclasses.fields(cls), key=lambda field: not field.metadata["kept"]):
        default = "" if field.default == "" else f" [{field.default}]"
        text = (field.metadata["help"] + default).replace("%", "%%")
        read = _number_or_word if field.type == int | str else field.type
        kind: dict[str, Any] = {"type": read, "metavar": _METAVARS.get(field.type, "N")}
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(f"--{_flag(field)}", dest=field.name, help=text, **kind)
    return parser


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _flag(field: dataclasses.Field[Any]) -> str:
    return field.name.replace("_", "-")


def _unknown(what: str, word: str, legal: list[str]) -> str:
    return f"unknown {what} {word}{suggest(word, legal)}; the {what}s are {', '.join(legal)}"


def _read_yaml(cls: type, path: str) -> dict[str, Any]:
    """The file's keys as field names, with values of the fields' types."""
    yaml = need("yaml")
    try:
        text = read_file(path).decode("utf-8")
        content, keys = yaml.safe_load(text), _keys(yaml.compose(text))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(f"--config {path} cannot be read: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ValueError(f"--config {path} is no YAML: {where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"--config {path}: expected lines of `option: value`; got a {type(content).__name__}"
        )
    fields = {field.name: field for field in dataclasses.fields(cls)}
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
        raise ValueError(f"--config {path} says `{twice}` twice; leave one of them out")
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ValueError(f"--config {path}: {_unknown('key', str(key), list(fields))}")
        values[name] = _typed(fields[name], value, path)
    return values


def _keys(node: Any) -> list[str]:
    """The keys of the file, of which YAML's loader takes the last without a word, as field names."""
    pairs = node.value if isinstance(getattr(node, "value", None), list) else []
    return [str(pair[0].value).replace("-", "_") for pair in pairs if isinstance(pair, tuple)]


def read_file(path: str) -> bytes:
    """The content of a file or a pipe; OSError for what has no end, as /dev/zero, and what is none."""
    if stat.S_ISCHR(pathlib.Path(path).stat().st_mode):
        raise OSError(None, "it is a device")
    return pathlib.Path(path).read_bytes()


def _typed(field: dataclasses.Field[Any], value: Any, path: str) -> Any:
    """`value` as the field's type, where YAML meant the same."""
    # YAML reads 1e-3 as a string (its floats have a dot) and 1 as an integer.
    if field.type is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (OverflowError, ValueError):
            pass
    if type(value) not in (typing.get_args(field.type) or (field.type,)):
        raise ValueError(
            f"--config {path}: `{field.name}` must be {_EXPECTED[field.type]}; got {reprlib.repr(value)}"
        )
    return value
