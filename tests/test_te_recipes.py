"""TransformerEngine's recipe objects as recipes. The classes here have the fields of release 2.20."""

import dataclasses
import enum
from typing import Any

import pytest

from fp8jax import Recipe


class Format(enum.Enum):
    E2M1 = 6
    E4M3 = 448
    E5M2 = 57344
    HYBRID = 0


@dataclasses.dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_dpa: bool = False
    backward_override: str | None = None


@dataclasses.dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: QParams = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: QParams = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None


@dataclasses.dataclass
class NVFP4BlockScaling:
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3


class CustomRecipe:
    pass


PLAIN = QParams()


@pytest.mark.parametrize(
    "source, recipe",
    [
        (DelayedScaling(), "te"),
        (
            DelayedScaling(2, Format.E4M3, 16, "most_recent"),
            "te,fp8_format=E4M3,margin=2,amax_history_len=16,amax_compute_algo=most_recent",
        ),
        (Float8CurrentScaling(), "te,scaling=current"),
        (Float8BlockScaling(), "block"),
        (Float8BlockScaling(True, Format.E4M3, PLAIN, PLAIN, PLAIN), "block,scaling=block_float32"),
        (MXFP8BlockScaling(), "mxfp8"),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), "mxfp8,fp8_format=HYBRID"),
        (NVFP4BlockScaling(), "nvfp4"),
        (NVFP4BlockScaling(disable_rht=True), "nvfp4,fp4_options=stochastic+2d"),
        (NVFP4BlockScaling(True, True, True), "nvfp4,fp4_options="),
    ],
)
def test_objects(source, recipe):
    assert Recipe.from_te(source) == Recipe.parse(recipe)


@pytest.mark.parametrize(
    "source, message",
    [
        (CustomRecipe(), "expected one of TransformerEngine's DelayedScaling, .*; got CustomRecipe"),
        (DelayedScaling(fp8_format=Format.E5M2), r"fp8_format=E5M2\) is none of HYBRID and E4M3"),
        (DelayedScaling(fp8_dpa=True), r"no recipe expresses DelayedScaling\(fp8_dpa=True\)"),
        (DelayedScaling(amax_compute_algo=max), "`amax_compute_algo` is one of: max most_recent"),
        (DelayedScaling(scaling_factor_compute_algo=max), "expected scaling_factor_compute_algo=None"),
        (DelayedScaling(backward_override="dequantized"), "expected backward_override=None"),
        (Float8BlockScaling(fp8_format=Format.HYBRID), "needs fp8_format=E4M3: .*fp8_format=HYBRID"),
        (Float8BlockScaling(w_block_scaling_dim=1), "expected w_block_scaling_dim=2"),
        (Float8BlockScaling(fp8_quant_fwd_inp=PLAIN), "power_2_scale for some operands only"),
        (
            Float8BlockScaling(fp8_quant_bwd_grad=QParams(True, 1e-3)),
            r"fp8_quant_bwd_grad.amax_epsilon=0.001\); expected",
        ),
        (Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)), "fp8_gemm_fprop"),
        (MXFP8BlockScaling(margin=1), "margin=0"),
        (NVFP4BlockScaling(nvfp4_4over6="all"), "expected nvfp4_4over6='none'"),
        (NVFP4BlockScaling(row_scaled_activation=True), "expected row_scaled_activation=False"),
    ],
)
def test_what_no_recipe_has_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_te(source)
