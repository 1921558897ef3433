"""Block scaling on a GPU that lacks its format is refused, with the reason and what to use instead."""

import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.backends import Device
from fp8jax.inspect import report_check, targets

A100 = dataclasses.replace(targets.get("h100"), name="a100", device="NVIDIA A100", capability=(8, 0))
X = jnp.ones((128, 128), jnp.bfloat16)


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize(
    "recipe, target, says",
    [
        (
            "mxfp8",
            "h200",
            "NVIDIA H200: compute capability 9.0 has no GEMMs of MXFP8 .*; use the recipe block",
        ),
        (
            "nvfp4",
            "l40s",
            "NVIDIA L40S: compute capability 8.9 has no GEMMs of MXFP8 .*; use the recipe block",
        ),
        ("mxfp8", A100, "NVIDIA A100: compute capability 8.0 has no GEMMs of FP8, .*; use the recipe bf16"),
        ("block", A100, "NVIDIA A100: compute capability 8.0 has no GEMMs of FP8, .*; use the recipe bf16"),
    ],
)
def test_absent_gpu_without_a_format_is_refused(recipe, target, says):
    """XLA would dequantize the operands and say nothing."""
    model = fp8jax.transform(nn.Dense(128), recipe)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=f"block-scaled GEMMs cannot run on {says}"):
        targets.lower_for(model.apply, variables, X, target=target)


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
def test_block_scaling_for_a_gpu_unknown_to_pallas():
    """JAX's table of GPUs has no L40S."""
    model = fp8jax.transform(nn.Dense(128), "block")
    variables = model.init(jax.random.key(0), X)
    assert "gpu.triton" in targets.lower_for(model.apply, variables, X, target="l40s").as_text()


@pytest.mark.parametrize(
    "device, says",
    [
        (Device("cpu", "cpu", None), None),
        (Device("TPU v5e", "tpu", None), "TPU v5e is no NVIDIA GPU.* use the recipe te"),
        (Device("MI300X", "gpu", None), "MI300X is no NVIDIA GPU"),
        (Device("H100", "gpu", (9, 0)), "9.0 has no GEMMs of MXFP8"),
        (Device("A100", "gpu", (8, 0)), "8.0 has no GEMMs of FP8"),
        (Device("B200", "gpu", (10, 0)), None),
    ],
)
def test_device_without_a_format_is_refused(device, says, monkeypatch):
    monkeypatch.setattr(Device, "here", lambda: device)
    if says is None:
        fp8jax.transform(nn.Dense(128), "mxfp8")
        return
    with pytest.raises(ValueError, match=f"`backend`: auto cannot run here: .*{says}"):
        fp8jax.transform(nn.Dense(128), "mxfp8").init(jax.random.key(0), X)


@pytest.mark.parametrize("name", ["te", "current", "O2", "fp8"])
@pytest.mark.parametrize("device", [Device("TPU v7x", "tpu", None), Device("MI300X", "gpu", None)])
def test_the_report_says_what_is_untested(name, device, monkeypatch):
    monkeypatch.setattr(Device, "here", lambda: device)
    report = fp8jax.transform(nn.Dense(128), name).report(X)
    assert f"untested on {device.name}" in str(report)


@pytest.mark.parametrize("name", ["te", "current", "O2", "fp8"])
def test_the_report_says_that_a_gpu_has_no_fp8(name, monkeypatch):
    """With a scale per tensor XLA dequantizes: right numbers, small states and no speed."""
    monkeypatch.setattr(Device, "here", lambda: Device("NVIDIA A100", "gpu", (8, 0)))
    report = fp8jax.transform(nn.Dense(128), name).report(X)
    assert "XLA dequantizes the operands of FP8 GEMMs on NVIDIA A100: compute capability 8.0" in str(report)


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
def test_a_program_for_another_gpu_does_not_warn_of_this_one(monkeypatch):
    model = fp8jax.transform(nn.Dense(128), "current")
    variables = model.init(jax.random.key(0), X)
    monkeypatch.setattr(Device, "here", lambda: Device("NVIDIA A100", "gpu", (8, 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "f8E4M3FN" in targets.lower_for(model.apply, variables, X, target="h200").as_text()


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
@pytest.mark.parametrize("target, kinds", [("b200", ""), ("h200", "fprop and wgrad")])
def test_gemms_that_xla_dequantizes_are_named_with_the_cause(target, kinds, monkeypatch):
    """As on a GPU that is let through."""
    monkeypatch.setattr(targets, "missing_gemms", lambda *_: None)
    rows = report_check.check((nn.Dense(256, name="up"), (X,)), "mxfp8", target=target)
    assert bool(rows[0].complaint) == bool(kinds) and rows[0].fp8 == (0 if kinds else 2)
    cause = "XLA dequantizes blocks where cuDNN has no GEMM for the GPU or the shapes"
    assert not kinds or (rows[0].complaint.startswith(kinds) and rows[0].complaint.endswith(cause))


def test_report_says_which_scaling_a_layer_has():
    layers = nn.Sequential([nn.Dense(64), nn.Dense(64), nn.Dense(64), nn.Dense(64)])
    rules = [fp8jax.Rule(last=1), fp8jax.Rule("layers_0", "te"), fp8jax.Rule("layers_1", "mxfp8")]
    report = fp8jax.transform(layers, "nvfp4", rules=rules).report(X)
    assert [row.scaling for row in report.rows] == ["delayed", "mxfp8", "nvfp4", ""]
    assert [row.backend for row in report.rows] == ["xla", "cudnn", "cudnn", ""]
    assert str(report).splitlines()[-1] == "backend: cudnn (emulated on a CPU)"
    answers = [line.split("%  ")[1] for line in str(report).splitlines()[2:6]]
    assert answers == ["yes", "yes, mxfp8", "yes, nvfp4", "rule: gemm=BF16"]


def test_report_names_the_formats_of_its_gemms():
    model = nn.Sequential([nn.Dense(64), nn.Dense(64)])
    rules = {"FP4": [], "FP4 and FP8": [fp8jax.Rule("layers_1", "mxfp8")]}
    for formats, mixed in rules.items():
        text = str(fp8jax.transform(model, "nvfp4", rules=mixed).report(jnp.ones((32, 64))))
        assert text.startswith(f"nvfp4: 2 of 2 layers in {formats}, 100%")
