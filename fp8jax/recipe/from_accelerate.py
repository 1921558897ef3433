"""HuggingFace Accelerate's FP8 settings, read as a preset and the fields that differ from it.

    read(TERecipeKwargs(margin=2))                      # ("te", {"margin": 2, ...})
    read({"backend": "msamp", "opt_level": "O1"})       # ("O1", {})
    read("config.yaml")                                 # its mixed_precision and its fp8_config
    read(None, {"ACCELERATE_MIXED_PRECISION": "bf16"})  # ("bf16", {})

Accelerate is not imported: objects are read by their attributes. `Recipe.from_accelerate` documents the
settings. A value may be a Python object in a dataclass, text in an environment variable, or what YAML parses:
there `override_linear_precision: (false, false, true)` is text, and `backend: no` is False.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from fp8jax.extras import need
from fp8jax.recipe import yaml_file
from fp8jax.recipe.from_te import Preset

_CLASSES = {
    "FP8RecipeKwargs": None,  # has a `backend`
    "TERecipeKwargs": "TE",
    "MSAMPRecipeKwargs": "MSAMP",
    "AORecipeKwargs": "AO",
}
_CONFIG = ("mixed_precision", "fp8_config")
_VARIABLE = "ACCELERATE_MIXED_PRECISION"
_PREFIX = "ACCELERATE_FP8_"
# The environment's spelling of override_linear_precision.
_GEMMS = (f"{_PREFIX}OVERRIDE_FPROP", f"{_PREFIX}OVERRIDE_DGRAD", f"{_PREFIX}OVERRIDE_WGRAD")
# TransformerEngine's settings that are no field of a recipe.
_NO_FIELDS = ("use_autocast_during_eval", "use_mxfp8_block_scaling")
# Those of scales for whole tensors, which MXFP8 lacks.
_OF_TENSORS = ("margin", "interval", "amax_history_len", "amax_compute_algo")
# `accelerate launch` sets all of these for every backend.
_LAUNCHED = {"fp8_format", "margin", "interval", "amax_history_len", "amax_compute_algo", "opt_level"}
# Spellings of accelerate's questionnaire, its documentation and its environment variables.
_ALIASES = {
    "format": "fp8_format",
    "optimization_level": "opt_level",
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
}


class _Setting(NamedTuple):
    """A value, accelerate's name for it, and the key that the user gave it under."""

    name: str
    key: str
    value: Any


def read(source: object, environ: Mapping[str, str] | None = None) -> Preset:
    """The preset that settings ask for.

    Args and errors: those of `Recipe.from_accelerate`.
    """
    if source is None:
        environ = os.environ if environ is None else environ
        given = {key: value for key, value in environ.items() if key.startswith(_PREFIX)}
        if not given and _VARIABLE not in environ:
            raise _error(f"expected a `source`, or {_VARIABLE} or {_PREFIX}* in the environment; got neither")
        return _with_precision(environ.get(_VARIABLE), _VARIABLE, _gather(given))
    if environ is not None:
        raise _error("`environ` is read where no `source` is given; got both")
    if isinstance(source, str | os.PathLike):
        return _from_config(_load(source))
    given = source if isinstance(source, Mapping) else _attributes(source)
    return _from_config(given) if _is_config(given) else _preset(_gather(given))


def _from_config(content: Mapping[Any, Any]) -> Preset:
    """The preset of a whole configuration. The other keys are not about precision."""
    given: dict[str, Any] = {}
    for key, value in content.items():
        name = _plain(key)
        if name in given:
            raise _error(f"expected {name} once; got it twice")
        if name in _CONFIG:
            given[name] = value
        else:
            _check_other(key, name)
    block = given.get("fp8_config") or {}
    if not isinstance(block, Mapping):
        raise _error(f"`fp8_config` is a block of `key: value`; got {block!r}")
    return _with_precision(given.get("mixed_precision"), "mixed_precision", _gather(block))


def _with_precision(precision: object, key: str, settings: list[_Setting]) -> Preset:
    """The preset of a mixed precision and FP8 settings. One of the two may be missing."""
    if precision is None and not settings:
        raise _error(f"expected `{key}` or settings of FP8; got neither")
    preset = "fp8" if precision is None else _precision(key, precision)
    if preset == "fp8":
        return _preset(settings)
    if settings:
        got = ", ".join(f"{setting.key}={setting.value!r}" for setting in settings)
        raise _error(f"settings of FP8 need {key}=fp8; got {key}={precision} and {got}")
    return preset, {}


def _is_config(given: Mapping[Any, Any]) -> bool:
    return any(_plain(key) in _CONFIG for key in given)


def _check_other(key: object, name: str) -> None:
    """Refuses a key that was meant for `mixed_precision` or `fp8_config`; the others are accelerate's own."""
    # accelerate has a block "fsdp_config", which is as close to "fp8_config" as many typing errors.
    near = difflib.get_close_matches(name, _CONFIG, n=1, cutoff=0.85) if name != "fsdp_config" else []
    if near:
        raise _error(f"unknown {key} (did you mean {near[0]}?); expected {' and '.join(_CONFIG)}")
    if _name(key) is not None or name.startswith("fp8"):
        raise _error(f"expected {key} in the block fp8_config; got it beside {' and '.join(_CONFIG)}")


def _load(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """The content of a configuration file."""
    yaml = need("yaml")
    try:
        content = yaml.safe_load(yaml_file.read_text(path))
    except ValueError as error:
        raise _error(str(error)) from None
    except yaml.YAMLError as error:
        raise _error(f"{os.fspath(path)} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping) or not _is_config(content):
        raise _error(f"expected `mixed_precision:` or `fp8_config:` in {os.fspath(path)}; got neither")
    return content


def _attributes(source: object) -> dict[str, Any]:
    """An object's attributes, with the backend if its class names one."""
    if isinstance(source, type) or not hasattr(source, "__dict__"):
        raise TypeError(
            "from_accelerate: expected `source` to be an object like TERecipeKwargs(...), a mapping, the "
            f"path of a config.yaml, or None for the environment; got {source!r}."
        )
    found = {name: value for name, value in vars(source).items() if not name.startswith("_")}
    named = [cls.__name__ for cls in type(source).__mro__ if cls.__name__ in _CLASSES]
    return {"backend": _CLASSES[named[0]], **found} if named else found


def _gather(given: Mapping[Any, Any]) -> list[_Setting]:
    """The settings of values by any spelling of their names; None counts as not given."""
    given = {key: value for key, value in given.items() if value is not None}
    if any(key in given for key in _GEMMS):
        if given.get(_GEMMS[0]) in ("(", "["):
            expected = (
                "true false; write `override_linear_precision: [false, false, true]` in the config.yaml, as "
                "`accelerate launch` passes on single letters of text"
            )
            raise _illegal(_GEMMS[0], given[_GEMMS[0]], expected)
        given[f"{_PREFIX}OVERRIDE_LINEAR_PRECISION"] = [
            _boolean(key, given.pop(key, False)) for key in _GEMMS
        ]
    if unknown := [str(key) for key in given if _name(key) is None]:
        raise _unknown(unknown)
    named = [(cast(str, _name(key)), str(key), raw) for key, raw in given.items()]
    return [_Setting(name, key, SETTINGS[name].parse(key, raw)) for name, key, raw in named]


def _preset(settings: list[_Setting]) -> Preset:
    """The preset of the settings' backend. Refuses contradictions, and settings of other backends."""
    # `accelerate launch` sets every setting: to the default where the user gave none, or gave it in the
    # questionnaire's spelling, which it does not read.
    if _LAUNCHED <= {setting.name for setting in settings if setting.key.startswith(_PREFIX)}:
        settings = [setting for setting in settings if setting.value != SETTINGS[setting.name].default]
    given: dict[str, Any] = {}
    for name, _, value in settings:
        if given.setdefault(name, value) != value:
            both = " and ".join(f"{each.key}={each.value!r}" for each in settings if each.name == name)
            raise _error(f"expected one value of `{name}`; got {both}")
    backend = given.get("backend") or ("MSAMP" if "opt_level" in given else "TE")
    defaults = {name: spec.default for name, spec in SETTINGS.items() if spec.backend == backend}
    for name, key, value in settings:
        other, _, default = SETTINGS[name]
        # FP8RecipeKwargs and a launch set the other backends' defaults, too.
        if other in ("", backend) or (other != "MSAMP" and value == default):
            continue
        combined = "; Recipe.parse('te+O2') is TransformerEngine's scaling in MS-AMP's O2"
        raise _error(
            f"`{key}` is for backend {other}, and the backend is {backend}, which has "
            f"{', '.join(defaults)}; got {key}={value!r}{combined if other == 'MSAMP' else ''}"
        )
    values = {name: given.get(name, default) for name, default in defaults.items()}
    if backend == "MSAMP":
        return values["opt_level"], {}
    if not values["use_mxfp8_block_scaling"]:
        return "te", {name: value for name, value in values.items() if name not in _NO_FIELDS}
    # Accelerate hands on only what differs from its own defaults, as here.
    if scales := [name for name in _OF_TENSORS if values[name] != defaults[name]]:
        raise _error(f"use_mxfp8_block_scaling takes no {', '.join(scales)}; leave that out")
    return "mxfp8", {"override_linear_precision": values["override_linear_precision"]}


def _plain(key: object) -> str:
    """A key in lower case, with underscores."""
    return str(key).strip().lower().replace("-", "_")


def _name(key: object) -> str | None:
    """Accelerate's name of a setting in any spelling, or None."""
    name = _plain(key).removeprefix(_PREFIX.lower()).removeprefix("fp8_")
    name = _ALIASES.get(name, name)
    return name if name in SETTINGS else None


def _unknown(keys: list[str]) -> ValueError:
    """One error for all unknown keys."""
    legal = (*SETTINGS, *_ALIASES)
    if keys[0].startswith(_PREFIX):
        legal = (*(f"{_PREFIX}{name.removeprefix('fp8_').upper()}" for name in SETTINGS), *_GEMMS)
    shown = []
    for key in keys:
        near = difflib.get_close_matches(key if key.startswith(_PREFIX) else _plain(key), legal, n=1)
        shown.append(f"{key} (did you mean {near[0]}?)" if near else key)
    return _error(f"unknown {', '.join(shown)}; expected some of {', '.join(legal)}")


def _error(text: str) -> ValueError:
    return ValueError(f"from_accelerate: {text}.")


def _illegal(key: str, got: object, expected: str) -> ValueError:
    return _error(f"`{key}` is one of: {expected}; got {got!r}")


def _one_of(
    words: str, also: Mapping[Any, Any] | None = None, refused: Mapping[str, str] | None = None
) -> Callable[[str, object], Any]:
    """A parser of one of some words, in any case.

    Args:
        words: legal words, as errors list them.
        also: values of further words, and of words that do not stand for themselves.
        refused: reasons by word.
    """
    values = {word.casefold(): word for word in words.split()} | dict(also or {})

    def parse(key: str, raw: object) -> Any:
        word = str(raw).strip().casefold()
        if word not in values:
            raise _illegal(key, raw, words + (refused or {}).get(word, ""))
        return values[word]

    return parse


# The words that accelerate's `str_to_bool` knows.
_boolean = _one_of(
    "true false",
    dict.fromkeys("y yes t true on 1".split(), True) | dict.fromkeys("n no f false off 0".split(), False),
)
# YAML reads an unquoted `no` as False.
_precision = _one_of("no fp16 bf16 fp8", {"no": "fp32", "false": "fp32", "fp16": "fp16_amp"})
_format = _one_of("HYBRID E4M3", refused={"e5m2": " (E5M2 is too coarse for a forward that trains)"})
# Accelerate's templates spell MS-AMP; None is where the other settings decide.
_backend = _one_of(
    "TE MSAMP auto",
    {"ms-amp": "MSAMP", "ms_amp": "MSAMP", "auto": None, "no": None, "false": None},
    {
        "ao": " (torchao's settings have no recipe; Recipe.parse('te,scaling=current') scales as it does, "
        "and `exclude` keeps the first and the last layer out)"
    },
)


def _integer(key: str, raw: object) -> int:
    try:
        return int(str(raw))
    except ValueError:
        raise _illegal(key, raw, "an integer") from None


def _override(key: str, raw: object) -> tuple[bool, ...]:
    items = raw.strip().strip("()[]").split(",") if isinstance(raw, str) else raw
    # The questionnaire first asks whether to override any, and older files have its "no" as it is.
    if str(raw).strip().lower() in ("no", "false"):
        return (False, False, False)
    if not isinstance(items, list | tuple) or len(items) != 3:
        raise _illegal(key, raw, "false, or three booleans: fprop dgrad wgrad")
    return tuple(_boolean(key, item) for item in items)


class _Spec(NamedTuple):
    """A setting: its backend, the parser of its values, and Accelerate's default."""

    backend: str
    parse: Callable[[str, Any], Any]
    default: Any


# Defaults are those of accelerate 1.15.0 (utils/dataclasses.py). TransformerEngine's own amax_compute_algo is
# "max", and MS-AMP's own opt_level is O1.
SETTINGS = {
    "backend": _Spec("", _backend, None),
    "fp8_format": _Spec("TE", _format, "HYBRID"),
    "margin": _Spec("TE", _integer, 0),
    "interval": _Spec("TE", _integer, 1),
    "amax_history_len": _Spec("TE", _integer, 1024),
    "amax_compute_algo": _Spec("TE", _one_of("max most_recent"), "most_recent"),
    "override_linear_precision": _Spec("TE", _override, (False, False, False)),
    "use_autocast_during_eval": _Spec("TE", _boolean, False),
    "use_mxfp8_block_scaling": _Spec("TE", _boolean, False),
    "opt_level": _Spec("MSAMP", _one_of("O1 O2"), "O2"),
    "config": _Spec("AO", lambda _, raw: raw, None),
    "module_filter_func": _Spec("AO", lambda _, raw: raw, None),
    "pad_inner_dim": _Spec("AO", _boolean, True),
    "enable_fsdp_float8_all_gather": _Spec("AO", _boolean, True),
}
