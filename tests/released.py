"""MS-AMP and TransformerEngine as far as their interface goes: parameters of the released functions, as data.

The modules made from them fail on a call that would not fit the real ones. TransformerEngine's linear layers
run all three GEMMs on FP8 codes, in the format of the autocast's recipe; other modules compute as torch's do.
"""

import dataclasses
import enum
import inspect
import sys
import types
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

# What was read in the released sources. A signature is its parameters' names, kinds and defaults.

# github.com/Azure/MS-AMP v0.4.0 (51f34ac): msamp/__init__.py, optim/adam.py, optim/adamw.py
MSAMP_INITIALIZE = "model, optimizer=None, opt_level='O1', use_te=False"
MSAMP_LBADAM = (
    "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, maximize=False, "
    "*args, **kwargs"
)
MSAMP_LBADAMW = (
    "params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, "
    "*, maximize=False, exp_avg_dtype=None, exp_avg_sq_dtype=None, tensor_scale=True"
)

_LINEAR_1 = (
    "in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, "
    "tp_size=1, get_rng_state_tracker=None, {tracker}init_method=None, bias=True, return_bias=False, "
    "params_dtype=None, parallel_mode=None, parameters_split=None, device='cuda', "
)
_NORM_1 = (
    "hidden_size, eps=1e-5, sequence_parallel=False, params_dtype=None, zero_centered_gamma=False, "
    "device='cuda'"
)
_NORM_2 = (
    "normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False, "
    "hidden_size=None, **kwargs"
)
_FIELDS_1 = (
    "margin=0, interval={interval}, fp8_format=HYBRID, amax_history_len=1024, amax_compute_algo='max', "
    "override_linear_precision=OVERRIDE, scaling_factor_compute_algo=None, reduce_amax=True"
)
_FIELDS_2 = (
    "margin=0, fp8_format=HYBRID, amax_history_len=1024, amax_compute_algo='max', "
    "scaling_factor_compute_algo=None, reduce_amax=True, fp8_dpa=False, fp8_mha=False"
)
_CURRENT = (
    "use_power_2_scales=False, fp8_format=HYBRID, fp8_gemm_fprop=None, fp8_gemm_dgrad=None, "
    "fp8_gemm_wgrad=None, fp8_dpa=False, fp8_mha=False"
)
_TRACKER = {"tracker": "rng_tracker_name=None, "}

# github.com/NVIDIA/TransformerEngine: common/recipe, pytorch/module/{linear,layernorm}.py,
# pytorch/fp8.py and, since 2.9, pytorch/quantization.py
TE = {
    # cf6fc898, the one that MS-AMP 0.4.0 asks for
    "1.1": {
        "Linear": _LINEAR_1.format(tracker="")
        + "ub_split_rs=False, ub_split_ag=False, ub_atomic_gemm_rs=False, ub_atomic_gemm_ag=False, "
        "ub_name=None",
        "LayerNorm": _NORM_1,
        "fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None",
        "check_fp8_support": "",
        "DelayedScaling": _FIELDS_1.format(interval=1),
    },
    # e5edd6cc
    "1.13": {
        "Linear": _LINEAR_1.format(**_TRACKER) + "ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None",
        "LayerNorm": _NORM_2,
        "fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False",
        "check_fp8_support": "",
        "DelayedScaling": _FIELDS_1.format(interval=-1) + ", fp8_dpa=False, fp8_mha=False",
    },
    # 40c69e75
    "2.8": {
        "Linear": _LINEAR_1.format(**_TRACKER)
        + "ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, "
        "ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, "
        "save_original_input=False, name=None",
        "LayerNorm": _NORM_2,
        "fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False",
        "check_fp8_support": "",
        "DelayedScaling": _FIELDS_2,
        "Float8CurrentScaling": _CURRENT,
    },
    # 27486e03; the autocast is a class, and the one of before still there
    "2.18": {
        "Linear": _LINEAR_1.format(**_TRACKER)
        + "ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, "
        "ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, "
        "save_original_input=False, name=None",
        "LayerNorm": _NORM_2,
        "autocast": "enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False",
        "fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False",
        "is_fp8_available": "return_reason=False",
        "DelayedScaling": _FIELDS_2 + ", backward_override=None",
        "Float8CurrentScaling": _CURRENT + ", backward_override=None",
    },
}


class Override(NamedTuple):
    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


class Format(enum.Enum):
    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


NAMES = {"HYBRID": Format.HYBRID, "OVERRIDE": Override()}


def bind(signature, args, kwargs):
    """The arguments by parameter's name; TypeError if they do not fit."""
    function = eval(f"lambda {signature}: None", dict(NAMES))
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def package(monkeypatch, **modules):
    """Puts modules, by name with "__" for the dots, where `import` finds them."""
    for name, attributes in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class FP8Matmul(torch.autograd.Function):
    """`x @ weight.T` and its gradients as products of FP8 codes, with current scales; x has shape (m, k)."""

    @staticmethod
    def forward(ctx, x, weight, format):
        codes = [to_fp8(tensor, format.value[0]) for tensor in (x, weight)]
        ctx.codes, ctx.largest = codes, format.value[1]
        return gemm(codes[0], transposed(codes[1]))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.codes
        grad = to_fp8(grad, ctx.largest)
        return gemm(grad, weight), gemm(transposed(grad), x), None


def to_fp8(x, largest):
    """Codes in the format with this maximum, and their scale."""
    scale = x.abs().amax().clamp(min=1e-30) / largest
    return (x / scale).to({448: torch.float8_e4m3fn, 57344: torch.float8_e5m2}[largest]), scale


def transposed(codes_and_scale):
    return codes_and_scale[0].t(), codes_and_scale[1]


def gemm(lhs, rhs):
    """Each product of two codes is exact in float32."""
    (lhs, lhs_scale), (rhs, rhs_scale) = lhs, rhs
    assert lhs.dtype.itemsize == rhs.dtype.itemsize == 1, "not in FP8"
    return lhs.float() @ rhs.float() * (lhs_scale * rhs_scale)


def fake_te(monkeypatch, version, available=True):
    """A TransformerEngine of that version's interface; returns what is said to its autocast, call by call."""
    signatures, running, entered = TE[version], [], []

    class Linear(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            given = bind(signatures["Linear"], args, kwargs)
            shape, to = (
                (given["out_features"], given["in_features"]),
                {"dtype": given["params_dtype"], "device": given["device"]},
            )
            self.weight = nn.Parameter(torch.full(shape, torch.nan, **to))
            if given["bias"]:
                self.bias = nn.Parameter(torch.full(shape[:1], torch.nan, **to))
            else:
                self.bias = torch.Tensor()

        def get_extra_state(self):
            return torch.empty(0, dtype=torch.uint8)

        def set_extra_state(self, state):
            pass

        def forward(self, inp):
            assert running, "not under the autocast"
            recipe = running[-1].get("recipe") or running[-1]["fp8_recipe"]
            out = FP8Matmul.apply(inp.flatten(0, -2), self.weight, recipe.fp8_format)
            out = out.unflatten(0, inp.shape[:-1])
            return out + self.bias if self.bias.numel() else out

    class LayerNorm(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            given = bind(signatures["LayerNorm"], args, kwargs)
            size = given.get("normalized_shape") or given["hidden_size"]
            self.eps = given["eps"]
            self.weight = nn.Parameter(torch.full((size,), torch.nan, dtype=given["params_dtype"]))
            self.bias = nn.Parameter(torch.full((size,), torch.nan, dtype=given["params_dtype"]))

        def forward(self, inp):
            return functional.layer_norm(inp, self.weight.shape, self.weight, self.bias, self.eps)

    class Autocast:
        def __init__(self, name, args, kwargs):
            self.given = {"by": name, **bind(signatures[name], args, kwargs)}

        def __enter__(self):
            running.append(self.given)
            entered.append(self.given)

        def __exit__(self, *ignored):
            running.pop()

    def of(name, value):
        return {name: value} if name in signatures else {}

    def support(name):
        def function(*args, **kwargs):
            bind(signatures[name], args, kwargs)
            return available, "" if available else "CUDA is too old."

        return of(name, function)

    def fields(name):
        defaults = bind(signatures[name], (), {})
        made = dataclasses.make_dataclass(
            name, [(field, object, dataclasses.field(default=value)) for field, value in defaults.items()]
        )
        return {name: made}

    package(
        monkeypatch,
        transformer_engine={},
        transformer_engine__common={},
        transformer_engine__common__recipe={
            "Format": Format,
            **fields("DelayedScaling"),
            **(fields("Float8CurrentScaling") if "Float8CurrentScaling" in signatures else {}),
        },
        transformer_engine__pytorch={
            "Linear": Linear,
            "LayerNorm": LayerNorm,
            **of("autocast", lambda *a, **k: Autocast("autocast", a, k)),
            "fp8_autocast": lambda *a, **k: Autocast("fp8_autocast", a, k),
            **support("is_fp8_available"),
        },
        transformer_engine__pytorch__fp8=support("check_fp8_support"),
    )
    return entered


def fake_msamp(monkeypatch):
    """An MS-AMP of 0.4.0's interface; returns what is said to its `initialize`."""
    calls = []

    class LBAdamW(torch.optim.SGD):
        use_adam = False

        def __init__(self, *args, **kwargs):
            self.given = bind(MSAMP_LBADAMW, args, kwargs)
            super().__init__(self.given["params"], self.given["lr"])

    class LBAdam(LBAdamW):
        def __init__(self, *args, **kwargs):
            given = bind(MSAMP_LBADAM, args, kwargs)
            super().__init__(
                **{k: v for k, v in given.items() if k not in ("args", "kwargs")}, **given["kwargs"]
            )
            self.use_adam = True

    def initialize(*args, **kwargs):
        given = bind(MSAMP_INITIALIZE, args, kwargs)
        calls.append(given)
        optimizer = given["optimizer"] or torch.optim.AdamW(given["model"].parameters())
        settings = optimizer.defaults
        settings["exp_avg_dtype"] = torch.uint8 if given["opt_level"] == "O2" else torch.float32
        settings["exp_avg_sq_dtype"] = torch.float16 if given["opt_level"] == "O2" else torch.float32
        for name in ("foreach", "capturable", "differentiable", "fused"):
            settings.pop(name, None)
        if given["optimizer"] is None:
            settings.pop("decoupled_weight_decay", None)
        made = LBAdam if isinstance(optimizer, torch.optim.Adam) else LBAdamW
        return given["model"], made(optimizer.param_groups, **settings)

    package(monkeypatch, msamp={"initialize": initialize})
    return calls
