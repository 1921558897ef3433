"""A value in accelerate's words, as Python's: `read_value("margin", key, "2")` is 2.

The same value is a Python object in a dataclass, text in an environment variable, and what YAML makes of it
in a file: `override_linear_precision: (false, false, true)` is text there, `backend: no` is False. What a
recipe cannot express is refused here, with what it can.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any


def read_value(name: str, key: str, raw: Any) -> Any:
    """The value of accelerate's setting `name`, which stands under `key`.

    Raises:
        ValueError: none of that setting's values, or one that no recipe has.
    """
    return _READ[name](key, raw) if name in _READ else raw


def read_boolean(key: str, raw: Any) -> bool:
    """A boolean, or a word that accelerate's `str_to_bool` knows.

    Raises:
        ValueError: anything else.
    """
    word = raw.strip().lower() if isinstance(raw, str) else None
    if raw is True or (type(raw) is int and raw == 1) or word in ("y", "yes", "t", "true", "on", "1"):
        return True
    if raw is False or (type(raw) is int and raw == 0) or word in ("n", "no", "f", "false", "off", "0"):
        return False
    raise illegal(key, raw, "true false")


def read_word(key: str, raw: Any, legal: Iterable[str]) -> str:
    """The one of `legal` that `raw` is, in any case; YAML reads an unquoted `no` as False.

    Raises:
        ValueError: it is none of them.
    """
    raw_word = "no" if raw is False else raw
    word = raw_word.strip().casefold() if isinstance(raw_word, str) else None
    for choice in legal:
        if choice.casefold() == word:
            return choice
    raise illegal(key, raw, " ".join(legal))


def complaint(text: str) -> ValueError:
    """The error of a setting that cannot be read."""
    return ValueError(f"from_accelerate: {text}.")


def illegal(key: str, got: Any, expected: str) -> ValueError:
    """The error of a value."""
    return complaint(f"`{key}` is one of: {expected}; got {got!r}")


def _integer(key: str, raw: Any) -> int:
    try:
        if type(raw) is int or isinstance(raw, str):
            return int(raw)
    except ValueError:
        pass
    raise illegal(key, raw, "an integer")


def _override(key: str, raw: Any) -> tuple[bool, ...]:
    items = raw.strip().strip("()[]").split(",") if isinstance(raw, str) else raw
    # The questionnaire asks for all three first; its "no" stands in older files as it is.
    if items is False or (isinstance(raw, str) and raw.strip().lower() in ("no", "false")):
        return (False, False, False)
    if not isinstance(items, list | tuple) or len(items) != 3:
        raise illegal(key, raw, "false, or three booleans: fprop dgrad wgrad")
    return tuple(read_boolean(key, item) for item in items)


def _format(key: str, raw: Any) -> str:
    if isinstance(raw, str) and raw.strip().upper() == "E5M2":
        raise illegal(key, raw, "HYBRID E4M3 (E5M2 is too coarse for a forward that trains)")
    return read_word(key, raw, ("HYBRID", "E4M3"))


def _blocks(key: str, raw: Any) -> bool:
    if read_boolean(key, raw):
        raise illegal(key, raw, "false (here a scale is one per tensor, not one per MXFP8 block)")
    return False


def _backend(key: str, raw: Any) -> str | None:
    """TE, MSAMP, or None for what other settings decide; MS-AMP is a spelling of accelerate's templates."""
    word = raw.replace("-", "").replace("_", "") if isinstance(raw, str) else raw
    if isinstance(word, str) and word.strip().casefold() == "ao":
        raise illegal(
            key,
            raw,
            "TE MSAMP auto (torchao's settings have no recipe; Recipe.parse('te,scaling=current') scales as "
            "it does, and `exclude` keeps the first and the last layer out)",
        )
    if isinstance(word, str) and word.strip().casefold() == "no" or word is False:
        return None
    choice = read_word(key, word, ("TE", "MSAMP", "auto"))
    return None if choice == "auto" else choice


_READ: dict[str, Callable[[str, Any], Any]] = {
    "backend": _backend,
    "fp8_format": _format,
    "margin": _integer,
    "interval": _integer,
    "amax_history_len": _integer,
    "amax_compute_algo": functools.partial(read_word, legal=("max", "most_recent")),
    "override_linear_precision": _override,
    "use_autocast_during_eval": read_boolean,
    "use_mxfp8_block_scaling": _blocks,
    "opt_level": functools.partial(read_word, legal=("O1", "O2")),
    "pad_inner_dim": read_boolean,
    "enable_fsdp_float8_all_gather": read_boolean,
}
