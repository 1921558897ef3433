"""Block scaling on a GPU that lacks its format is refused, with the reason and what to use instead."""

import dataclasses
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.inspect import targets

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
        ("mxfp8", A100, "NVIDIA A100: compute capability 8.0 has no FP8 GEMMs, .*; use the recipe bf16"),
        ("block", A100, "NVIDIA A100: compute capability 8.0 has no FP8 GEMMs, .*; use the recipe bf16"),
    ],
)
def test_absent_gpu_without_a_format_is_refused(recipe, target, says):
    """XLA would dequantize the operands and say nothing."""
    model = fp8jax.transform(nn.Dense(128), recipe)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=f"block-scaled GEMMs cannot run on {says}"):
        targets.lower_for(model.apply, variables, X, target=target)


@pytest.mark.parametrize(
    "device, says",
    [
        (dict(platform="cpu", device_kind="cpu"), None),
        (dict(platform="tpu", device_kind="TPU v5e"), "TPU v5e is no NVIDIA GPU.* use the recipe te"),
        (dict(platform="gpu", device_kind="MI300X", compute_capability="gfx942"), "MI300X is no NVIDIA GPU"),
        (dict(platform="gpu", device_kind="H100", compute_capability="9.0"), "9.0 has no GEMMs of MXFP8"),
        (dict(platform="gpu", device_kind="A100", compute_capability="8.0"), "8.0 has no FP8 GEMMs"),
        (dict(platform="gpu", device_kind="B200", compute_capability="10.0"), None),
    ],
)
def test_device_without_a_format_is_refused(device, says, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**device)])
    if says is None:
        fp8jax.transform(nn.Dense(128), "mxfp8")
        return
    with pytest.raises(ValueError, match=f"scaling=mxfp8 cannot run here: .*{says}"):
        fp8jax.transform(nn.Dense(128), "mxfp8").init(jax.random.key(0), X)
