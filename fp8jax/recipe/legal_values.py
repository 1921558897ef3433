"""The legal values of a recipe's fields, and their text."""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any

_FP4_OPTIONS = ("hadamard", "stochastic", "2d", "46", "eden")
_NVIDIAS = _FP4_OPTIONS[:3]
# Why "eden" goes with none of NVIDIA's options.
_NOT_WITH_EDEN = {
    "hadamard": "it has a rotation of its own, of 128 entries, in both GEMMs of the backward",
    "stochastic": "it rounds gradients to nearest, and only their scales at random",
    "2d": "it rotates the weights of the backward, so that they share no codes with the forward's",
}

_FP8 = {
    "gemm": ("FP8", "FP4 has scaling=nvfp4, and no other"),
    "fp4_options": (_NVIDIAS, "leave out the options of FP4"),
}
_FP4 = {"gemm": ("FP4", "it is the scaling of FP4, and its only one")}
_FROM_BLOCKS = {
    "margin": (0, "each scale is computed from its block"),
    "interval": (1, "each scale is computed from its block"),
}
_E4M3 = {"fp8_format": ("E4M3", "no GPU kernel here multiplies E5M2 and E4M3 blocks")}

# The scalings, and the other fields that have only one legal value with a scaling: the value, and the reason.
FIELDS_OF_SCALING: dict[str, Mapping[str, tuple[Any, str]]] = {
    "delayed": _FP8,
    "current": _FP8,
    "block": _FP8 | _FROM_BLOCKS | _E4M3,
    "block_float32": _FP8 | _FROM_BLOCKS | _E4M3,
    "mxfp8": _FP8 | _FROM_BLOCKS,
    "nvfp4": _FP4 | _FROM_BLOCKS,
}

_LEGAL: dict[str, Collection[Any]] = {
    "gemm": ("FP32", "BF16", "FP16", "FP8", "FP4"),
    "comm": ("FP32", "BF16", "FP8"),
    "weight": ("FP32", "FP16", "E4M3"),
    "master_weight": ("-", "FP32", "FP16"),
    "weight_grad": ("FP32", "E4M3"),
    "moments": (("FP32", "FP32"), ("E4M3", "FP16"), ("E5M2", "FP16"), ("E5M2", "E4M4")),
    "rounding": tuple(
        itertools.product(("nearest", "stochastic"), ("nearest", "stochastic", "kahan"), ("value", "root"))
    ),
    "scaling": FIELDS_OF_SCALING,
    "fp8_format": ("HYBRID", "E4M3"),
    "amax_compute_algo": ("max", "most_recent"),
    "first_scale": ("typical", "tensor", "one"),
    "fp4_options": [
        chosen
        for count in range(5)
        for chosen in itertools.combinations(_FP4_OPTIONS, count)
        if "eden" not in chosen or not {*chosen} & {*_NVIDIAS}
    ],
}


# The least and the largest legal number.
_INTEGERS = {"margin": (0, 100), "interval": (1, 2**20), "amax_history_len": (1, 2**20)}


def check(recipe: Any) -> None:
    """Raises ValueError if a field's value is not legal, or two fields contradict each other."""
    _check_eden(recipe.fp4_options)
    for name, legal in _LEGAL.items():
        if getattr(recipe, name) not in legal:
            raise _illegal(name, getattr(recipe, name), " ".join(map(shown, legal)))
    for name, (least, largest) in _INTEGERS.items():
        number = getattr(recipe, name)
        if type(number) is not int or not least <= number <= largest:
            got = number if isinstance(number, str) else repr(number)  # as `np.int64(1)`
            raise _illegal(name, got, f"an integer from {least} to {largest}")
    override = recipe.override_linear_precision
    if not isinstance(override, tuple) or [type(flag) for flag in override] != [bool] * 3:
        raise _illegal("override_linear_precision", override, "three booleans, as False+False+True")
    _check_patterns("include", recipe.include)
    _check_patterns("exclude", recipe.exclude)
    _check_combination(recipe)


def shown(value: Any) -> str:
    """One value as `Recipe.parse` reads it."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parsed(text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`field=value,field=value` as a dict of values of the defaults' types; see `recipe.parse_changes`."""
    changes: dict[str, Any] = {}
    for change in text.split(","):
        name, equals, raw = (part.strip() for part in change.partition("="))
        if not equals or name not in defaults:
            raise ValueError(
                f"recipe: expected field=value after the preset, with a field of {', '.join(defaults)}; got "
                f"{change.strip()!r}."
            )
        if name in changes:
            raise ValueError(f"recipe: expected each field once; got {name} twice in {text!r}.")
        changes[name] = _parse_value(raw, defaults[name])
    return changes


def _parse_value(raw: str, default: Any) -> Any:
    """Text as a value of the default's type; other text stays as it is, and `Recipe` refuses it."""
    if isinstance(default, tuple):
        words = tuple(word.strip() for word in raw.split("+")) if raw else ()
        booleans = {"true": True, "false": False} if isinstance(default[0], bool) else {}
        return tuple(booleans.get(word.lower(), word) for word in words)
    try:
        return int(raw) if isinstance(default, int) else raw
    except ValueError:
        return raw


def _illegal(name: str, got: Any, expected: str) -> ValueError:
    return ValueError(f"recipe: `{name}` is one of: {expected}; got {shown(got)!r}.")


def _check_patterns(name: str, patterns: Any) -> None:
    is_legal = isinstance(patterns, tuple) and all(
        isinstance(p, str) and p and not any(c in ",+=" or c.isspace() for c in p) for p in patterns
    )
    if not is_legal:
        raise _illegal(name, patterns, "a tuple of patterns without comma, plus, equals, space")
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"recipe: `{name}`: {pattern!r} is no regular expression ({error}).") from None


def _check_eden(options: Any) -> None:
    """Raises ValueError if "eden" is combined with an option that it replaces."""
    if isinstance(options, tuple) and "eden" in options:
        for option, reason in _NOT_WITH_EDEN.items():
            if option in options:
                raise ValueError(
                    f"recipe: fp4_options=eden goes without {option}: {reason}; got "
                    f"fp4_options={shown(options)}."
                )


def _check_combination(recipe: Any) -> None:
    """Raises ValueError if two columns contradict each other."""
    if (recipe.weight == "E4M3") != (recipe.master_weight != "-"):
        raise ValueError(
            "recipe: E4M3 weights are too coarse to train without master weights, so weight=E4M3 needs "
            "master_weight=FP16 or FP32, and any other weight needs master_weight=-; got "
            f"weight={recipe.weight}, master_weight={recipe.master_weight}."
        )
    for name, (value, reason) in FIELDS_OF_SCALING[recipe.scaling].items() if recipe.is_quantized else ():
        if (got := getattr(recipe, name)) != value:
            raise ValueError(
                f"recipe: scaling={recipe.scaling} needs {name}={shown(value)}: {reason}; got "
                f"{name}={shown(got)}."
            )
    if not recipe.is_quantized and (recipe.weight != "FP32" or recipe.weight_grad != "FP32"):
        raise ValueError(
            "recipe: weight and weight_grad are the formats of layers with FP8 or FP4 GEMMs; with "
            f"gemm={recipe.gemm} both must be FP32; got weight={recipe.weight}, "
            f"weight_grad={recipe.weight_grad}."
        )
    of_mu, of_weight, of_nu = recipe.rounding
    if recipe.moments == ("FP32", "FP32") and (of_mu, of_nu) != ("nearest", "value"):
        raise ValueError(
            "recipe: FP32 moments are not rounded: moments=FP32+FP32 needs "
            f"rounding=nearest+{of_weight}+value; got rounding={shown(recipe.rounding)}."
        )
    if recipe.moments[1] == "E4M4" and of_nu != "root":
        raise ValueError(
            f"recipe: moments={shown(recipe.moments)} stores the second moment's root, so it needs "
            f"rounding={of_mu}+{of_weight}+root; got rounding={shown(recipe.rounding)}."
        )
    if of_weight != "nearest" and "FP16" not in (recipe.weight, recipe.master_weight):
        raise ValueError(
            f"recipe: rounding={shown(recipe.rounding)} rounds FP16 weights or FP16 master weights; got "
            f"weight={recipe.weight}, master_weight={recipe.master_weight}. Say "
            f"rounding={of_mu}+nearest+{of_nu}."
        )
    if all(recipe.override_linear_precision) and recipe.is_quantized:
        raise ValueError("recipe: override_linear_precision takes all three GEMMs out of FP8; say gemm=BF16.")
    if recipe.is_quantized and not recipe.include:
        raise ValueError("recipe: include is empty, so no layer is in FP8; say gemm=BF16.")
