"""HuggingFace Accelerate's words for FP8, read as a preset and the fields that differ from it.

    read(TERecipeKwargs(margin=2))                      # ("te", {"margin": 2, ...})
    read({"backend": "msamp", "opt_level": "O1"})       # ("O1", {})
    read("config.yaml")                                 # its mixed_precision and its fp8_config
    read(None, {"ACCELERATE_MIXED_PRECISION": "bf16"})  # ("bf16", {})

Accelerate itself is not imported: objects are read by their attributes. `Recipe.from_accelerate` documents
the settings. This module finds them in objects, dicts, files and environment variables; `settings` names them
and `values` parses each.
"""

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from fp8jax.accelerate.settings import PREFIX, Setting, gather, name_of, plain, preset_of
from fp8jax.accelerate.values import complaint, read_word

_CLASSES = {
    "FP8RecipeKwargs": None,  # has a `backend`
    "TERecipeKwargs": "TE",
    "MSAMPRecipeKwargs": "MSAMP",
    "AORecipeKwargs": "AO",
}
_PRECISIONS = {"no": "fp32", "fp16": "fp16_amp", "bf16": "bf16", "fp8": "fp8"}
_CONFIG = ("mixed_precision", "fp8_config")
_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def read(source: Any, environ: Mapping[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """A preset's name, and values by the names of a recipe's fields.

    Args and errors: those of `Recipe.from_accelerate`.
    """
    if source is None:
        return _from_environ(os.environ if environ is None else environ)
    if environ is not None:
        raise complaint("`environ` is read where no `source` is given; got both")
    if isinstance(source, str | os.PathLike):
        return _from_config(_load(source))
    given = source if isinstance(source, Mapping) else _attributes(source)
    return _from_config(given) if _is_config(given) else preset_of(gather(given))


def _from_environ(environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    given = {key: value for key, value in environ.items() if key.startswith(PREFIX)}
    if not given and _VARIABLE not in environ:
        raise complaint(f"expected a `source`, or {_VARIABLE} or {PREFIX}* in the environment; got neither")
    return _of_precision(environ.get(_VARIABLE), _VARIABLE, gather(given, launched=True))


def _from_config(content: Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
    """`mixed_precision` and `fp8_config` of a configuration whose other keys are not about precision."""
    given: dict[str, Any] = {}
    for key, value in content.items():
        _check_top_level(key)
        if plain(key) in given and plain(key) in _CONFIG:
            raise complaint(f"expected {plain(key)} once; got it twice")
        given[plain(key)] = value
    block = given.get("fp8_config") or {}
    if not isinstance(block, Mapping):
        raise complaint(f"`fp8_config` is a block of `key: value`; got {block!r}")
    return _of_precision(given.get("mixed_precision"), "mixed_precision", gather(block))


def _of_precision(raw: Any, key: str, settings: dict[str, Setting]) -> tuple[str, dict[str, Any]]:
    """What a mixed precision and settings of FP8 say together; either may be missing, but not both."""
    if raw is None and not settings:
        raise complaint(f"expected `{key}` or settings of FP8; got neither")
    precision = "fp8" if raw is None else read_word(key, raw, _PRECISIONS)
    if precision == "fp8":
        return preset_of(settings)
    if settings:
        got = ", ".join(f"{setting.key}={setting.value!r}" for setting in settings.values())
        raise complaint(f"settings of FP8 need {key}=fp8; got {key}={precision} and {got}")
    return _PRECISIONS[precision], {}


def _is_config(given: Mapping[Any, Any]) -> bool:
    return any(plain(key) in _CONFIG for key in given)


def _load(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """The content of a configuration file."""
    try:
        import yaml
    except ImportError:
        raise ImportError(
            "from_accelerate: a config.yaml is read by PyYAML; run: pip install 'fp8jax[train]'"
        ) from None
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        _check_unique(yaml.compose(text, yaml.SafeLoader), os.fspath(path))
        content = yaml.safe_load(text)
    except UnicodeDecodeError:
        raise complaint(f"{os.fspath(path)} is no YAML: it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise complaint(f"{os.fspath(path)} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping) or not _is_config(content):
        raise complaint(f"expected `mixed_precision:` or `fp8_config:` in {os.fspath(path)}; got neither")
    return content


def _check_unique(root: Any, path: str) -> None:
    """Refuses a key that stands twice in one block of a YAML file, of which the parser keeps the last."""
    nodes, met = [root], set()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in met:  # an alias is the node that it names
            continue
        met.add(id(node))
        if node.id == "sequence":
            nodes += node.value
        elif node.id == "mapping":
            nodes += [value for _, value in node.value]
            seen: set[str] = set()
            for key in (key for key, _ in node.value if key.id == "scalar"):
                if key.value in seen:
                    again = f"got it again in line {key.start_mark.line + 1}"
                    raise complaint(f"expected `{key.value}` once in a block of {path}; {again}")
                seen.add(key.value)


def _attributes(source: Any) -> dict[str, Any]:
    """An object's attributes, and the backend that its class is named after."""
    if isinstance(source, type) or not (dataclasses.is_dataclass(source) or hasattr(source, "__dict__")):
        raise TypeError(
            "from_accelerate: expected `source` to be an object like TERecipeKwargs(...), a mapping, the "
            f"path of a config.yaml, or None for the environment; got {source!r}."
        )
    if dataclasses.is_dataclass(source):
        found = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    else:
        found = {name: value for name, value in vars(source).items() if not name.startswith("_")}
    named = [cls.__name__ for cls in type(source).__mro__ if cls.__name__ in _CLASSES]
    return {"backend": _CLASSES[named[0]], **found} if named else found


def _check_top_level(key: Any) -> None:
    """Refuses a key that was meant for `mixed_precision` or `fp8_config`; the others are accelerate's own."""
    name = plain(key)
    if name in _CONFIG:
        return
    # "fsdp_config" is a block of accelerate's, and as near to "fp8_config" as many a slip.
    near = difflib.get_close_matches(name, _CONFIG, n=1, cutoff=0.85) if name != "fsdp_config" else []
    if near:
        raise complaint(f"unknown {key} (did you mean {near[0]}?); expected {' and '.join(_CONFIG)}")
    if name_of(key) is not None or name.startswith("fp8"):
        raise complaint(f"expected {key} in the block fp8_config; got it beside {' and '.join(_CONFIG)}")
