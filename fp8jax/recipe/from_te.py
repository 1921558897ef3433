"""TransformerEngine's recipe objects, read as a preset and the fields that differ from it.

    read(DelayedScaling(margin=2))                      # ("te", {"margin": 2, ...})
    read(Float8BlockScaling())                          # ("block", {...})
    read(NVFP4BlockScaling(disable_rht=True))           # ("nvfp4", {"fp4_options": ("stochastic", "2d")})

TransformerEngine is not imported: objects are read by their class's name and their fields: all are
dataclasses.

References:
    TransformerEngine 2.20, `common/recipe/__init__.py`.
"""

import dataclasses
from typing import Any

# A preset's name, and values by the names of a recipe's fields.
Preset = tuple[str, dict[str, Any]]

_PRESETS = {
    "DelayedScaling": "te",
    "Float8CurrentScaling": "te",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
# Attributes that are fields of a recipe, and those that `_scaling` reads.
_FIELDS = ("margin", "amax_history_len", "amax_compute_algo")
_READ = ("fp8_format", "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
_SCALES = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_SCALE_FLAGS = ("use_power_2_scales", "use_f32_scales")
# The only values that a recipe can express.
_ONLY = {
    "scaling_factor_compute_algo": None,
    "reduce_amax": True,
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "x_block_scaling_dim": 1,
    "w_block_scaling_dim": 2,
    "grad_block_scaling_dim": 1,
}


def read(source: Any) -> Preset:
    """The preset and the changes that a recipe object asks for.

    Args and errors: those of `Recipe.from_te`.
    """
    kind = type(source).__name__
    if kind not in _PRESETS:
        raise ValueError(f"`source`: expected one of TransformerEngine's {', '.join(_PRESETS)}; got {kind}.")
    for field in dataclasses.fields(source):
        if field.name not in (*_FIELDS, *_READ, *_SCALES, *_SCALE_FLAGS):
            _check(kind, field.name, getattr(source, field.name), _ONLY.get(field.name, field.default))
    changes = {name: getattr(source, name) for name in _FIELDS if hasattr(source, name)}
    return _PRESETS[kind], changes | _format(kind, source) | _scaling(kind, source)


def _check(kind: str, name: str, given: Any, expected: Any) -> None:
    if given != expected:
        raise ValueError(
            f"`source`: no recipe expresses {kind}({name}={given!r}); expected {name}={expected!r}."
        )


def _format(kind: str, source: Any) -> dict[str, Any]:
    """The recipe's `fp8_format`."""
    name = getattr(source, "fp8_format", None)
    name = getattr(name, "name", name)
    if name not in ("HYBRID", "E4M3"):
        raise ValueError(f"`source`: {kind}(fp8_format={name}) is none of HYBRID and E4M3.")
    return {"fp8_format": name}


def _scaling(kind: str, source: Any) -> dict[str, Any]:
    """The recipe's `scaling` and `fp4_options`, where they differ from the preset's."""
    if kind == "NVFP4BlockScaling":
        disabled = {
            "hadamard": source.disable_rht,
            "stochastic": source.disable_stochastic_rounding,
            "2d": source.disable_2d_quantization,
        }
        return {"fp4_options": tuple(option for option, is_off in disabled.items() if not is_off)}
    if kind not in ("Float8CurrentScaling", "Float8BlockScaling"):
        return {}
    is_block = kind == "Float8BlockScaling"
    powers = {getattr(getattr(source, name, None), "power_2_scale", is_block) for name in _SCALES}
    if len(powers) > 1:
        raise ValueError(
            f"`source`: {kind} with power_2_scale for some operands only; expected it for all or none."
        )
    for name in _SCALES:
        _check(kind, f"{name}.amax_epsilon", getattr(getattr(source, name, None), "amax_epsilon", 0.0), 0.0)
    if is_block:
        return {} if powers == {True} else {"scaling": "block_float32"}
    _check(kind, "power_2_scale", powers == {True}, False)
    return {"scaling": "current"}
