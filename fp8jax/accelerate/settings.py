"""Accelerate's settings by accelerate's names, however they are spelled, and the preset they add up to.

    settings = gather({"fp8_backend": "te", "amax_history_length": 16})
    settings["amax_history_len"]    # Setting(key="amax_history_length", value=16)
    preset_of(settings)             # ("te", {"amax_history_len": 16, "margin": 0, ...})

`gather` refuses a key that means nothing and a setting with two values, `preset_of` one that is for another
backend than the one in use; what nobody set is accelerate's default.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fp8jax.accelerate.values import complaint, illegal, read_boolean, read_value

# Each backend's settings and their defaults, of accelerate 1.15.0 (utils/dataclasses.py). TransformerEngine's
# own amax_compute_algo is "max", MS-AMP's own opt_level O1.
DEFAULTS: dict[str, dict[str, Any]] = {
    "TE": {
        "fp8_format": "HYBRID",
        "margin": 0,
        "interval": 1,
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_autocast_during_eval": False,
        "use_mxfp8_block_scaling": False,
    },
    "MSAMP": {"opt_level": "O2"},
    "AO": {
        "config": None,
        "module_filter_func": None,
        "pad_inner_dim": True,
        "enable_fsdp_float8_all_gather": True,
    },
}
# Those of TransformerEngine's that no field of a recipe stands for.
_NO_FIELDS = ("use_autocast_during_eval", "use_mxfp8_block_scaling")
_DEFAULT = {name: value for settings in DEFAULTS.values() for name, value in settings.items()}
NAMES = ("backend", *_DEFAULT)
# Spellings of accelerate's questionnaire, its documentation and its environment variables.
_ALIASES = {
    "format": "fp8_format",
    "optimization_level": "opt_level",
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
}

PREFIX = "ACCELERATE_FP8_"
# The environment's spelling of override_linear_precision.
_GEMMS = (f"{PREFIX}OVERRIDE_FPROP", f"{PREFIX}OVERRIDE_DGRAD", f"{PREFIX}OVERRIDE_WGRAD")
# `accelerate launch` sets all of these, and opt_level, whatever the backend.
_LAUNCHED = {"fp8_format", "margin", "interval", "amax_history_len", "amax_compute_algo"}


class Setting(NamedTuple):
    """A value and the key that it stands under."""

    key: str
    value: Any


def plain(key: Any) -> str:
    """A key without its case and dashes."""
    return str(key).strip().lower().replace("-", "_")


def name_of(key: Any) -> str | None:
    """Accelerate's name of what `key` spells, or None."""
    name = plain(key).removeprefix(PREFIX.lower())
    name = name if name in NAMES else name.removeprefix("fp8_")
    name = _ALIASES.get(name, name)
    return name if name in NAMES else None


def gather(given: Mapping[Any, Any], launched: bool = False) -> dict[str, Setting]:
    """The settings by accelerate's names; None is as good as nothing.

    Args:
        given: values by any spelling of the settings' names.
        launched: whether they are `accelerate launch`'s: it sets all that it knows, to the default where it
            was told nothing or, by its questionnaire's spelling, something that it does not read.

    Raises:
        ValueError: a key that means nothing, a value that is not legal, or two values of one setting.
    """
    _check_known([key for key in given if name_of(key) is None and key not in _GEMMS])
    settings: dict[str, Setting] = {}
    for name, setting in _read(given):
        earlier = settings.setdefault(name, setting)
        if earlier.value == setting.value:
            continue
        told = [s for s in (earlier, setting) if s.value != _DEFAULT.get(name)]
        if not launched or len(told) != 1:
            raise complaint(
                f"expected one value of `{name}`; got {earlier.key}={earlier.value!r} and "
                f"{setting.key}={setting.value!r}"
            )
        [settings[name]] = told
    if launched and settings.keys() >= _LAUNCHED and _value(settings, "opt_level") == _DEFAULT["opt_level"]:
        del settings["opt_level"]
    return settings


def preset_of(settings: Mapping[str, Setting]) -> tuple[str, dict[str, Any]]:
    """The preset of the settings' backend, and the recipe's fields that they give.

    Raises:
        ValueError: a setting is for another backend.
    """
    backend = _value(settings, "backend") or ("MSAMP" if "opt_level" in settings else "TE")
    for other, defaults in DEFAULTS.items():
        for name in (name for name in defaults if name in settings and other != backend):
            # FP8RecipeKwargs and `accelerate launch` carry the other backends' defaults along.
            if other == "MSAMP" or settings[name].value != defaults[name]:
                raise _foreign(settings[name], other, backend)
    values = {name: settings[name].value if name in settings else d for name, d in DEFAULTS[backend].items()}
    if backend == "MSAMP":
        return values["opt_level"], {}
    return "te", {name: value for name, value in values.items() if name not in _NO_FIELDS}


def _read(given: Mapping[Any, Any]) -> Iterator[tuple[str, Setting]]:
    """Name and value of everything that is given, the variables of the three GEMMs as one."""
    for key, raw in given.items():
        name = name_of(key)
        if name is not None and raw is not None:
            yield name, Setting(str(key), read_value(name, str(key), raw))
    if any(key in given for key in _GEMMS):
        if given.get(_GEMMS[0]) in ("(", "["):
            expected = (
                "true false; write `override_linear_precision: [false, false, true]` in the config.yaml"
            )
            why = ", as `accelerate launch` passes on single letters of text"
            raise illegal(_GEMMS[0], given[_GEMMS[0]], expected + why)
        override = tuple(read_boolean(key, given.get(key, False)) for key in _GEMMS)
        yield "override_linear_precision", Setting(f"{PREFIX}OVERRIDE_*", override)


def _value(settings: Mapping[str, Setting], name: str) -> Any:
    return settings[name].value if name in settings else None


def _foreign(setting: Setting, other: str, backend: str) -> ValueError:
    both = "; Recipe.parse('te+O2') is TransformerEngine's scaling in MS-AMP's O2" if other == "MSAMP" else ""
    return complaint(
        f"`{setting.key}` is for backend {other}, and the backend is {backend}, which has "
        f"{', '.join(DEFAULTS[backend])}; got {setting.key}={setting.value!r}{both}"
    )


def _check_known(unknown: Iterable[Any]) -> None:
    """Raises one error for all keys that mean nothing."""
    keys = [str(key) for key in unknown]
    if not keys:
        return
    if keys[0].startswith(PREFIX):
        legal = tuple(f"{PREFIX}{name.removeprefix('fp8_').upper()}" for name in NAMES) + _GEMMS
        nearest = [difflib.get_close_matches(key, legal, n=1) for key in keys]
    else:
        legal = (*NAMES, *_ALIASES)
        nearest = [difflib.get_close_matches(plain(key), legal, n=1) for key in keys]
    shown = [
        f"{key} (did you mean {near[0]}?)" if near else key for key, near in zip(keys, nearest, strict=True)
    ]
    raise complaint(f"unknown {', '.join(shown)}; expected some of {', '.join(legal)}")
